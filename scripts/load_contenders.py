"""Ways to get a checkpoint's tensors into memory, for `bench_load.py` to compare.

Each takes a prepared output and its unprepared source and returns the tensors it made, on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from deepinfer_prep import fp8
from deepinfer_prep.manifest import Manifest, read_manifest
from deepinfer_prep.runtime import PreparedCheckpoint, Request, load_weights, rescale_fp8_weights

_TAKE_CHUNK = 64 * 1024 * 1024


class UnavailableError(Exception):
    """The contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way to load; `about` is a line for the table's legend."""

    name: str
    about: str
    prepare: Callable[[Path], Any]
    """Untimed: makes what the way needs besides the files, from the prepared output."""
    load: Callable[[Path, Path, Any], list[torch.Tensor]]
    """Timed: output, source, and what `prepare` made."""


def shards(folder: Path, manifest: Manifest) -> list[Path]:
    """The safetensors files with the source's tensors, in a folder with the names of a prepared output."""
    return [folder / name for name in manifest.shards]


def model_like(checkpoint: PreparedCheckpoint, device: str) -> nn.Module:
    """A model with a parameter for every tensor of the source but the scales, which loading attaches."""
    scales = {record.scale for record in checkpoint.manifest.weights.values()}
    root = nn.Module()
    for name in checkpoint.names:
        if name in scales:
            continue
        stored, module = checkpoint.tensor(name), root
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        data = torch.zeros(stored.shape, dtype=stored.dtype, device=device)
        module.register_parameter(leaf, nn.Parameter(data, requires_grad=False))
    return root


def _nothing(output: Path) -> None:
    return None


def _model_on(device: str) -> Callable[[Path], nn.Module]:
    def prepare(output: Path) -> nn.Module:
        with PreparedCheckpoint(output) as checkpoint:
            return model_like(checkpoint, device)

    return prepare


def _held(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and the scales attached to them."""
    parameters = list(model.parameters())
    scales: list[torch.Tensor] = [parameter.sf for parameter in parameters if hasattr(parameter, "sf")]
    return [*parameters, *scales]


def _ours(output: Path, source: Path, model: nn.Module) -> list[torch.Tensor]:
    load_weights(model, output, progress=False)
    return _held(model)


def _ours_pread(output: Path, source: Path, model: nn.Module) -> list[torch.Tensor]:
    with PreparedCheckpoint(output, access="pread") as checkpoint:
        load_weights(model, checkpoint, progress=False)
    return _held(model)


def _ours_digests(access: Literal["mmap", "pread"]) -> Callable[[Path, Path, nn.Module], list[torch.Tensor]]:
    def load(output: Path, source: Path, model: nn.Module) -> list[torch.Tensor]:
        with PreparedCheckpoint(output, access=access, verify="digests") as checkpoint:
            load_weights(model, checkpoint, progress=False)
        return _held(model)

    return load


def _ours_tensors(output: Path, source: Path, nothing: None) -> list[torch.Tensor]:
    with PreparedCheckpoint(output) as checkpoint:
        tensors: list[torch.Tensor] = checkpoint.read_all([Request(name) for name in checkpoint.names])
    return tensors


def _load_file(output: Path, source: Path, nothing: None) -> list[torch.Tensor]:
    return [tensor for path in shards(output, read_manifest(output)) for tensor in load_file(path).values()]


def _load_file_assign(output: Path, source: Path, model: nn.Module) -> list[torch.Tensor]:
    """Parameters of a model on meta replaced by tensors; scales are kept beside it."""
    tensors = {name: one for path in shards(output, read_manifest(output)) for name, one in load_file(path).items()}
    parameters = {name for name, _ in model.named_parameters()}
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in parameters}, assign=True)
    return list(tensors.values())


def _load_file_into(output: Path, source: Path, model: nn.Module) -> list[torch.Tensor]:
    """In-memory parameters by copies; the scales are kept as they come."""
    parameters = dict(model.named_parameters())
    kept = []
    with torch.no_grad():
        for path in shards(output, read_manifest(output)):
            for name, tensor in load_file(path).items():
                parameter = parameters.get(name)
                kept.append(tensor.clone() if parameter is None else parameter.copy_(tensor))
    return kept


def _load_and_take(output: Path, source: Path, nothing: None) -> list[torch.Tensor]:
    """The source, then each fp8 weight through a 256-entry table by numpy.take, each scale doubled once."""
    manifest = read_manifest(output)
    table = np.frombuffer(halving_table(), dtype=np.uint8)
    tensors = {name: tensor for path in shards(source, manifest) for name, tensor in load_file(path).items()}
    halved = {name: record for name, record in manifest.weights.items() if record.element == "e4m3"}
    for name in halved:
        codes = tensors[name].view(torch.uint8).reshape(-1).numpy()
        for start in range(0, codes.size, _TAKE_CHUNK):
            piece = codes[start : start + _TAKE_CHUNK]
            piece[:] = np.take(table, piece)
    for name in {record.scale for record in halved.values()}:
        tensors[name].view(torch.uint8).add_(1)
    return list(tensors.values())


def _load_and_rescale(output: Path, source: Path, model: nn.Module) -> list[torch.Tensor]:
    """The source into a model, then `rescale_fp8_weights`."""
    manifest = read_manifest(output)
    tensors = {name: tensor for path in shards(source, manifest) for name, tensor in load_file(path).items()}
    wanted = {name for name, _ in model.named_parameters()}
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in wanted}, assign=True)
    for name, parameter in model.named_parameters():
        if name in manifest.weights:
            parameter.sf = tensors[manifest.weights[name].scale]  # type: ignore[attr-defined]
    rescale_fp8_weights(model)
    return _held(model)


def halving_table() -> bytes:
    """e4m3fn(x / 2) for each of the 256 codes."""
    codes = np.arange(256, dtype=np.uint8)
    halved = np.empty_like(codes)
    fp8.halve(codes, halved)
    return halved.tobytes()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"not installed here ({error})") from None


def _fastsafetensors(output: Path, source: Path, nothing: None) -> list[torch.Tensor]:
    opener = _module("fastsafetensors").fastsafe_open
    paths = [str(path) for path in shards(output, read_manifest(output))]
    with opener(paths, device="cpu", nogds=True) as file:
        tensors: list[torch.Tensor] = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  # it is no mapping
    return tensors


def _runai(output: Path, source: Path, nothing: None) -> list[torch.Tensor]:
    streamer_class = _module("runai_model_streamer").SafetensorsStreamer
    with streamer_class() as streamer:
        streamer.stream_files([str(path) for path in shards(output, read_manifest(output))])
        return [tensor for _, tensor in streamer.get_tensors()]


def _instanttensor(output: Path, source: Path, nothing: None) -> list[torch.Tensor]:
    opener = _module("instanttensor").safe_open
    try:
        with opener([str(path) for path in shards(output, read_manifest(output))], "pt", "cpu") as file:
            return [tensor for _, tensor in file.tensors()]
    except ValueError as error:
        raise UnavailableError(f"has no CPU path ({error})") from None


def contenders() -> Iterator[Contender]:
    """All of them; `load_file`, which the others are compared with, comes first."""
    on_meta, in_memory = _model_on("meta"), _model_on("cpu")
    yield Contender("load_file", "safetensors load_file of the prepared shards, nothing else", _nothing, _load_file)
    yield Contender("ours", "load_weights into a model on meta, everything attached", on_meta, _ours)
    yield Contender("ours, digests", "the same with verify='digests'", on_meta, _ours_digests("mmap"))
    yield Contender("ours, tensors", "PreparedCheckpoint.read_all of every tensor", _nothing, _ours_tensors)
    yield Contender("ours, pread", "load_weights into a model on meta, access='pread'", on_meta, _ours_pread)
    yield Contender("ours, pread, digests", "the same with verify='digests'", on_meta, _ours_digests("pread"))
    yield Contender(
        "load_file, assign", "load_file, then load_state_dict(assign=True) on meta", on_meta, _load_file_assign
    )
    yield Contender("ours, in place", "load_weights into a model that has memory", in_memory, _ours)
    yield Contender(
        "load_file, in place", "load_file, then copy_ into a model that has memory", in_memory, _load_file_into
    )
    yield Contender(
        "load + take", "load_file of the source, then numpy.take and doubling at load", _nothing, _load_and_take
    )
    yield Contender("load + rescale", "load_file of the source, then rescale_fp8_weights", on_meta, _load_and_rescale)
    yield Contender("fastsafetensors", "fastsafe_open on the CPU", _nothing, _fastsafetensors)
    yield Contender("runai", "runai-model-streamer SafetensorsStreamer", _nothing, _runai)
    yield Contender("instanttensor", "instanttensor safe_open", _nothing, _instanttensor)

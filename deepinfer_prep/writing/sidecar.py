"""The sidecar: the files that hold what a graph needs beside the checkpoint's own tensors.

These are the bf16 halves of split matrices and the kernel scales that no stored tensor already is. Both are computed
from finished main shards: `convert` takes those it has just written, `verify` those that it finds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.files.container import Location, TensorInfo, encode_header, read_stored
from deepinfer_prep.files.read_ahead import AheadReaders, extent_of
from deepinfer_prep.files.storage import Readers
from deepinfer_prep.kernel_scale import Derived, PlannedWeight, ReadBytes, derive, resolve
from deepinfer_prep.naming import HI_SUFFIX, KERNEL_SCALE_SUFFIX, LO_SUFFIX, MARKER, MAX_MARKER, SIDECAR_PREFIX
from deepinfer_prep.planning.plan import Plan

MAX_FILE_BYTES = 4 * 1024**3
MAX_SIDECAR_HEADER_BYTES = 50_000_000
"""Half of what readers accept: a header of all tensors could be longer."""
_OFFSET_DIGITS = 20
_CHUNK_BYTES = 4 * 1024 * 1024

Locate = Callable[[str], Location]
"""Finds a tensor of the finished main shards."""


@dataclass(frozen=True, slots=True)
class Half:
    """One bf16 half of an fp32 matrix."""

    source: Location
    which: Literal["hi", "lo"]


@dataclass(frozen=True, slots=True)
class DerivedScale:
    """A kernel scale derived from a stored, already doubled scale."""

    source: Location
    plan: Derived


@dataclass(frozen=True, slots=True)
class SidecarTensor:
    """One tensor of the sidecar and where its values come from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    origin: Half | DerivedScale


@dataclass(frozen=True, slots=True)
class SidecarContents:
    """The sidecar's tensors, and every quantized weight with what its values say of its kernel scale."""

    tensors: tuple[SidecarTensor, ...]
    weights: tuple[PlannedWeight, ...]


@dataclass(frozen=True, slots=True)
class SidecarFile:
    """One file of the sidecar: its header and its tensors in the order of their bytes."""

    name: str
    """Relative to the output's folder."""
    header: bytes
    tensors: tuple[SidecarTensor, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def halves(name: str, source: Location) -> tuple[SidecarTensor, SidecarTensor]:
    """The two sidecar tensors of a split matrix."""
    shape, nbytes = source.tensor.shape, source.tensor.elements * 2
    return (
        SidecarTensor(name + HI_SUFFIX, "BF16", shape, nbytes, Half(source, "hi")),
        SidecarTensor(name + LO_SUFFIX, "BF16", shape, nbytes, Half(source, "lo")),
    )


def derived_scale(weight: str, source: Location, plan: Derived) -> SidecarTensor:
    """The sidecar tensor of a weight's derived kernel scale; `source` is the stored scale."""
    return SidecarTensor(weight + KERNEL_SCALE_SUFFIX, "U8", plan.shape, plan.nbytes, DerivedScale(source, plan))


def choose_contents(plan: Plan, locate: Locate) -> SidecarContents:
    """Decide what the sidecar of a planned conversion holds; of tensor data only scales are read.

    Args:
        locate: finds a tensor of the finished main shards.

    Raises:
        PrepError, OSError: a scale cannot be read.
    """
    tensors = [half for name in plan.split for half in halves(name, locate(name))]
    weights = []
    scales = {
        weight.quantized.scale: locate(weight.quantized.scale)
        for weight in plan.weights
        if isinstance(weight.kernel_scale, Derived)
    }
    with closing(AheadReaders(map(extent_of, scales.values()))) as readers:
        for weight in plan.weights:
            kernel_scale = weight.kernel_scale
            if isinstance(kernel_scale, Derived):
                source = scales[weight.quantized.scale]
                kernel_scale = resolve(kernel_scale, _reader(source, readers))
                if isinstance(kernel_scale, Derived):
                    tensors.append(derived_scale(weight.quantized.weight, source, kernel_scale))
            weights.append(PlannedWeight(weight.quantized, kernel_scale))
    return SidecarContents(tuple(tensors), tuple(weights))


def _reader(source: Location, readers: Readers) -> ReadBytes:
    return lambda start, stop: read_stored(source, start, stop, readers)


def tensor_chunks(tensor: SidecarTensor, readers: Readers) -> Iterator[fp8.U8]:
    """Yield a sidecar tensor's bytes in order, a few megabytes at a time.

    Raises:
        NoKernelScaleError: the scale's values have no kernel form.
        NoExactResultError: a matrix holds a value that is not finite in bf16.
    """
    source = tensor.origin.source
    if isinstance(tensor.origin, DerivedScale):
        yield from derive(tensor.origin.plan, _reader(source, readers))
        return
    position = 0 if tensor.origin.which == "hi" else 1
    for start in range(0, source.tensor.nbytes, _CHUNK_BYTES):
        raw = read_stored(source, start, min(start + _CHUNK_BYTES, source.tensor.nbytes), readers)
        yield fp8.split_hi_lo(raw.view("<f4"))[position].view(np.uint8)


def file_chunks(file: SidecarFile) -> Iterator[fp8.U8]:
    """Yield all bytes of a sidecar file in order."""
    yield np.frombuffer(file.header, dtype=np.uint8)
    with closing(AheadReaders(extent_of(tensor.origin.source) for tensor in file.tensors)) as readers:
        for tensor in file.tensors:
            yield from tensor_chunks(tensor, readers)


def lay_out(tensors: Iterable[SidecarTensor], tool_version: str) -> list[SidecarFile]:
    """Distribute tensors over files of at most 4 GiB with headers that readers accept.

    The 2-byte ones come first, so that all lie aligned.
    """
    metadata = {"format": "pt", MARKER: tool_version, MAX_MARKER: str(fp8.FP8_MAX)}
    ordered = sorted(tensors, key=lambda tensor: (tensor.dtype != "BF16", tensor.name))
    groups: list[list[SidecarTensor]] = []
    room, header_room = 0, 0
    for tensor in ordered:
        entry = len(encode_header(_infos([tensor]), {})) + _OFFSET_DIGITS
        if not groups or tensor.nbytes > room or entry > header_room:
            groups.append([])
            room, header_room = MAX_FILE_BYTES, MAX_SIDECAR_HEADER_BYTES
        groups[-1].append(tensor)
        room -= tensor.nbytes
        header_room -= entry
    names = [f"{SIDECAR_PREFIX}{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    return [
        SidecarFile(name, encode_header(_infos(group), metadata), tuple(group))
        for name, group in zip(names, groups, strict=True)
    ]


def index_json(files: Iterable[SidecarFile]) -> bytes:
    """The sidecar's own index, of the form that safetensors indexes have: file names are relative to its folder."""
    weight_map = {tensor.name: PurePosixPath(file.name).name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=1, ensure_ascii=False).encode() + b"\n"


def _infos(tensors: Iterable[SidecarTensor]) -> Iterator[TensorInfo]:
    position = 0
    for tensor in tensors:
        yield TensorInfo(tensor.name, tensor.dtype, tensor.shape, position, position + tensor.nbytes)
        position += tensor.nbytes

"""Loaders of other programs that take every safetensors file of a folder find the source's tensors and no others.

Each reader here does what a class of programs does with a folder, in as few lines as show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from deepinfer_prep import convert_checkpoint, verify_checkpoint
from deepinfer_prep.manifest import read_manifest
from tests.small_files import Tensor, write_config, write_file, write_index

TENSORS: dict[str, Tensor] = {
    "layers.0.down_proj.weight": ("F8_E4M3", (64, 128), 0x7E),
    "layers.0.down_proj.weight_scale_inv": ("F32", (2, 4), np.full(8, 0.5, np.float32).tobytes()),
    "layers.0.hc_attn_fn": ("F32", (4, 64), np.full(256, 0.3, np.float32).tobytes()),
    "norm.weight": ("BF16", (64,), 0x3F),
}
"""A derived kernel scale and a split matrix: both kinds of tensor that a sidecar holds."""

Reader = Callable[[Path], Iterator[tuple[str, torch.Tensor]]]


@pytest.fixture(params=["with an index", "without an index"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source, names = tmp_path / "source", list(TENSORS)
    files = {name: f"model-{1 + number % 2:05}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(files.values())):
        write_file(source / file, {name: TENSORS[name] for name in names if files[name] == file}, {"format": "pt"})
    if request.param == "with an index":
        write_index(source, files)
    write_config(source, quant_method="fp8", weight_block_size=[32, 32])
    convert_checkpoint(source, tmp_path / "out")
    assert len(read_manifest(tmp_path / "out").sidecar) == 1
    assert verify_checkpoint(tmp_path / "out", source=source).ok
    return tmp_path / "out"


def every_file(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream every safetensors file of the folder and never look at an index, as streaming loaders do."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def by_last_parts(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Rename each tensor by the last parts of its name and stop at one without a rule, as re-sharding scripts do."""
    known = {"down_proj", "hc_attn_fn", "norm"}
    for name, tensor in every_file(folder):
        parts = [part for part in name.split(".") if part not in ("layers", "weight", "weight_scale_inv", "0")]
        assert set(parts) <= known, f"key {name} not in mapping"
        yield name, tensor


def by_module_tree(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Follow each name through the modules of a model and stop below a parameter, as serving engines do."""
    for name, tensor in every_file(folder):
        place: nn.Module | nn.Parameter = model()
        for part in name.split("."):
            if isinstance(place, nn.Parameter):
                raise ValueError(f"attempted to load nested weight {name!r}")
            place = getattr(place, part)
        yield name, tensor


def model() -> nn.Module:
    made, layer = nn.Module(), nn.Module()
    layer.down_proj = nn.Linear(128, 64, bias=False)
    layer.down_proj.weight_scale_inv = nn.Parameter(torch.empty(2, 4))
    layer.hc_attn_fn = nn.Parameter(torch.empty(4, 64))
    made.layers, made.norm = nn.ModuleList([layer]), nn.LayerNorm(64)
    return made


@pytest.mark.parametrize("read", [every_file, by_last_parts, by_module_tree])
def test_readers_of_every_file_find_exactly_the_tensors_of_the_source(read: Reader, output: Path) -> None:
    found = dict(read(output))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: shape for name, (_, shape, _) in TENSORS.items()
    }
    assert int(found["layers.0.down_proj.weight"].view(torch.uint8).max()) == 0x76
    assert torch.all(found["layers.0.down_proj.weight_scale_inv"] == 1)


def test_the_top_of_an_output_holds_what_the_source_held_and_the_manifest(output: Path) -> None:
    source = {path.name for path in (output.parent / "source").iterdir()}
    assert {path.name for path in output.iterdir()} == {*source, "neuron", "neuron_manifest.json"}

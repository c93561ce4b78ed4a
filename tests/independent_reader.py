"""Dequantizes checkpoints with safetensors and torch alone: nothing of the project's code is used here."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu


def load_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that the index names, by name."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / name)
    assert tensors.keys() == index["weight_map"].keys()
    return tensors


def dequantize_all(tensors: dict[str, torch.Tensor], scale_suffix: str) -> dict[str, torch.Tensor]:
    """float64 values of every fp8 weight whose scale is named by a suffix in place of `weight`."""
    return {
        name: dequantize(weight, tensors[name.removesuffix("weight") + scale_suffix])
        for name, weight in tensors.items()
        if weight.dtype == FP8 and name.endswith(".weight")
    }


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight x scale in float64, each scale value repeated over its block."""
    if scale.dtype == torch.uint8:
        scale = scale.view(E8M0)
    factors = scale.double()
    for axis in (0, 1):
        block = next(
            size for size in (1, 32, 128, weight.shape[axis]) if -(-weight.shape[axis] // size) == scale.shape[axis]
        )
        factors = factors.repeat_interleave(block, axis)[
            tuple(slice(None) for _ in range(axis)) + (slice(weight.shape[axis]),)
        ]
    return weight.double() * factors


def assert_equal_but_for_rounded_codes(
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    source: dict[str, torch.Tensor],
) -> int:
    """Equal values except at the 16 odd codes below 2^-5, which move by half a step; returns how many moved."""
    assert before.keys() == after.keys()
    assert before
    moved = 0
    for name, values in before.items():
        codes = source[name].view(torch.uint8)
        rounded = ((codes & 0x7F) < 0x10) & (codes % 2 == 1)
        differs = values != after[name]
        assert not (differs & ~rounded).any(), name
        # A code of value c * 2^-9 becomes (c +- 1) * 2^-9, in units of the same scale.
        units = (codes & 0x7F).double()
        relative = ((after[name] - values).abs() * units)[differs] / values.abs()[differs]
        assert torch.all(relative == 1), name
        moved += int(differs.sum())
    return moved

"""What a manifest says of its tensors against what the headers say: dtypes, shapes, grids. No data is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from deepinfer_prep.errors import list_some
from deepinfer_prep.manifest import Manifest, WeightRecord
from deepinfer_prep.quantized import KERNEL_BLOCK, grid_shape, matrix_shape
from deepinfer_prep.runtime.dtypes import FLOAT_NAMES

_WEIGHT_DTYPES = {"e4m3": (torch.float8_e4m3fn,), "e2m1": (torch.int8, torch.uint8)}
_EXPONENT_DTYPES = (torch.float8_e8m0fnu, torch.uint8)
_MOST_NAMES = 3


class Described(Protocol):
    """A tensor as its header describes it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def contradictions(manifest: Manifest, tensors: Mapping[str, Described]) -> str:
    """What the manifest and the headers of its files say differently, as a sentence part; empty where they agree."""
    found = [
        *(problem for name, record in manifest.weights.items() for problem in _of_weight(name, record, tensors)),
        *(problem for name in manifest.split for problem in _of_split(name, manifest, tensors)),
        *(
            f"{name!r} is {tensors[name].dtype} instead of float8_e4m3fn"
            for name in manifest.unscaled
            if tensors[name].dtype != torch.float8_e4m3fn
        ),
    ]
    return list_some(found, _MOST_NAMES)


def kernel_grid(shape: tuple[int, ...], record: WeightRecord) -> tuple[int, ...]:
    """The shape of the kernel scale of a weight of this shape."""
    rows = 1 if record.element == "e2m1" else KERNEL_BLOCK
    return (*shape[:-2], *grid_shape(*matrix_shape(shape, record.element), (rows, KERNEL_BLOCK)))


def scale_grid(shape: tuple[int, ...], record: WeightRecord) -> tuple[int, ...] | None:
    """The shape of the scale of a weight of this shape; None where nothing states its blocks."""
    if record.block is None or len(shape) < 2:
        return None
    return (*shape[:-2], *grid_shape(*matrix_shape(shape, record.element), record.block))


def is_grid(stored: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether a scale of this shape has the values of a grid in their order, whatever axes of 1 either one has."""
    return [size for size in stored if size != 1] == [size for size in grid if size != 1]


def _of_weight(name: str, record: WeightRecord, tensors: Mapping[str, Described]) -> Iterator[str]:
    weight, scale = tensors[name], tensors[record.scale]
    if weight.dtype not in _WEIGHT_DTYPES[record.element]:
        yield f"{name!r} is {weight.dtype}, which is not how {record.element} is stored"
    if scale.dtype not in FLOAT_NAMES and scale.dtype not in _EXPONENT_DTYPES:
        yield f"{record.scale!r} is {scale.dtype}, which is no dtype of a scale"
    grid = scale_grid(weight.shape, record)
    # A scale that never had the values of its blocks was recorded as such: nothing is cut or launched by it.
    was_known = record.kernel_scale is None and "values where" in record.reason
    if grid is not None and not was_known and not is_grid(scale.shape, grid) and math.prod(scale.shape) != 1:
        block = record.block or (0, 0)
        yield (
            f"{name!r} of shape {list(weight.shape)} has a scale of shape {list(scale.shape)}, but blocks of "
            f"{block[0]}x{block[1]} would give {list(grid)}"
        )
    if record.kernel_scale is None:
        return
    kernel_scale = tensors[record.kernel_scale]
    wanted = kernel_grid(weight.shape, record) if len(weight.shape) >= 2 else ()
    if kernel_scale.dtype not in _EXPONENT_DTYPES or kernel_scale.shape != wanted:
        yield (
            f"the kernel scale of {name!r} is {kernel_scale.dtype} {list(kernel_scale.shape)} instead of e8m0 bytes "
            f"{list(wanted)}"
        )


def _of_split(name: str, manifest: Manifest, tensors: Mapping[str, Described]) -> Iterator[str]:
    record, shape = manifest.split[name], tensors[name].shape
    if tensors[name].dtype != torch.float32:
        yield f"{name!r} is {tensors[name].dtype} instead of float32"
    for part in (record.hi, record.lo):
        if (tensors[part].dtype, tensors[part].shape) != (torch.bfloat16, shape):
            yield f"{part!r} is {tensors[part].dtype} {list(tensors[part].shape)} instead of bfloat16 {list(shape)}"

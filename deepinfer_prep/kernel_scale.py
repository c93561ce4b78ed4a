"""The block scale that the NKI kernels take, from the scale that a checkpoint stores.

Kernel form: e8m0 bytes, `[ceil(n/32), ceil(k/32)]` for e4m3 weights (one byte a 32x32 block) and `[n, k/32]`
for e2m1 weights; leading axes (experts) stay. A stored scale of that form is used as it is. Others are
mapped block by block where every 32x32 block has one scale and that scale is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import FLOAT_DTYPES, Element, QuantizedWeight, grid_shape, matrix_shape, tensor_nbytes

KERNEL_BLOCK = 32
KERNEL_ROWS, KERNEL_COLUMNS = 32, 128
"""The GEMM kernels take weights whose rows and columns are multiples of these."""
_E8M0_DTYPES = ("F8_E8M0", "U8")
_ROWS_AT_ONCE_BYTES = 4 * 1024 * 1024

ReadBytes = Callable[[int, int], fp8.U8]
"""Reads the bytes start..stop of a stored scale tensor."""


class NoKernelScaleError(ValueError):
    """The values of a scale have no kernel form; the message is the reason."""


@dataclass(frozen=True, slots=True)
class KernelScalePlan:
    """What headers alone say: the scale is `stored` already, may be `derived` from values, or there is none."""

    stored: bool = False
    derived: DerivedScale | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DerivedScale:
    """How one stored scale maps to the kernel's grid; whether its values allow it only the data can tell."""

    scale_dtype: str
    matrices: int
    """Product of the leading axes: how many independent matrices the tensors hold."""
    grid: tuple[int, int]
    """Rows and columns of the stored scale of one matrix."""
    block: tuple[int, int]
    rows: int
    columns: int
    shape: tuple[int, ...]
    """Shape of the kernel scale, leading axes included."""

    @property
    def nbytes(self) -> int:
        """Bytes of the kernel scale."""
        return math.prod(self.shape)

    @property
    def conditions(self) -> tuple[str, ...]:
        """What the values have to fulfil, in words."""
        found = []
        if self.scale_dtype in FLOAT_DTYPES:
            found.append("every value is a power of two")
        if self.block[0] < min(KERNEL_BLOCK, self.rows):
            found.append("rows that share a block of 32 agree")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """A quantized weight with what is known about its kernel scale before data is read."""

    quantized: QuantizedWeight
    kernel_scale: KernelScalePlan


def plan_weight(checkpoint: Checkpoint, quantized: QuantizedWeight) -> PlannedWeight:
    """Plan the kernel scale of one weight of a checkpoint."""
    weight, scale = checkpoint.tensors[quantized.weight], checkpoint.tensors[quantized.scale]
    return PlannedWeight(quantized, plan_kernel_scale(quantized, weight, scale))


def plan_kernel_scale(quantized: QuantizedWeight, weight: TensorInfo, scale: TensorInfo) -> KernelScalePlan:
    """Decide from names, shapes and the stated blocks where a weight's kernel scale comes from."""
    if quantized.no_kernel_scale:
        return KernelScalePlan(reason=quantized.no_kernel_scale)
    if quantized.block is None:
        return KernelScalePlan(reason=quantized.block_problem or "nothing states the block size")
    kernel_block = (1, KERNEL_BLOCK) if quantized.element == "e2m1" else (KERNEL_BLOCK, KERNEL_BLOCK)
    rows, columns = matrix_shape(weight.shape, quantized.element)
    kernel_shape = (*weight.shape[:-2], *grid_shape(rows, columns, kernel_block))
    if quantized.block == kernel_block and scale.dtype in _E8M0_DTYPES and scale.shape == kernel_shape:
        return KernelScalePlan(stored=True)
    if quantized.element == "e2m1":
        return KernelScalePlan(reason="an fp4 weight's kernel scale is one e8m0 byte a row and 32 columns")
    problem = _misaligned(quantized.block, rows, columns)
    if problem:
        return KernelScalePlan(reason=problem)
    matrices = math.prod(weight.shape[:-2])
    grid = grid_shape(rows, columns, quantized.block)
    if scale.elements != matrices * grid[0] * grid[1]:
        return KernelScalePlan(reason=f"the scale has {scale.elements:,} values where {matrices} x {grid} are needed")
    return KernelScalePlan(
        derived=DerivedScale(scale.dtype, matrices, grid, quantized.block, rows, columns, kernel_shape)
    )


def is_outside_kernels(weight: TensorInfo, element: Element) -> bool:
    """Whether no GEMM kernel takes a weight of this shape, whatever its scale."""
    rows, columns = matrix_shape(weight.shape, element)
    return rows % KERNEL_ROWS != 0 or columns % KERNEL_COLUMNS != 0


def _misaligned(block: tuple[int, int], rows: int, columns: int) -> str:
    row_fits = block[0] % KERNEL_BLOCK == 0 or KERNEL_BLOCK % block[0] == 0 or block[0] >= rows
    column_fits = block[1] % KERNEL_BLOCK == 0 or block[1] >= columns
    if row_fits and column_fits:
        return ""
    return f"blocks of {block[0]}x{block[1]} do not line up with the kernel's blocks of 32x32"


def derive(plan: DerivedScale, read: ReadBytes) -> Iterator[fp8.U8]:
    """Yield the kernel scale's bytes in order, some rows at a time, from the (doubled) stored scale.

    Raises:
        NoKernelScaleError: a value is no positive power of two, or the 32 rows of a block disagree.
    """
    item = tensor_nbytes(plan.scale_dtype, (1,))
    grid_rows, grid_columns = plan.grid
    row_bytes = grid_columns * item
    kernel_rows = plan.shape[-2]
    grid_rows_per_kernel_row = max(1, KERNEL_BLOCK // plan.block[0])
    step = max(1, _ROWS_AT_ONCE_BYTES // max(1, plan.shape[-1], row_bytes * grid_rows_per_kernel_row))
    for matrix in range(plan.matrices):
        base = matrix * grid_rows
        for first in range(0, kernel_rows, step):
            last = min(first + step, kernel_rows)
            top = first * KERNEL_BLOCK // plan.block[0]
            bottom = math.ceil(min(last * KERNEL_BLOCK, plan.rows) / plan.block[0])
            raw = read((base + top) * row_bytes, (base + bottom) * row_bytes)
            grid = _exponents(raw, plan.scale_dtype).reshape(bottom - top, grid_columns)
            yield _to_kernel_rows(plan, grid, top, first, last)


def _to_kernel_rows(plan: DerivedScale, grid: fp8.U8, top: int, first: int, last: int) -> fp8.U8:
    together = KERNEL_BLOCK // plan.block[0]
    if together > 1:
        rows = _agreed_rows(grid, together, last - first)
    else:
        rows = grid[np.arange(first, last) * KERNEL_BLOCK // plan.block[0] - top]
    columns = np.arange(plan.shape[-1]) * KERNEL_BLOCK // plan.block[1]
    return np.ascontiguousarray(rows[:, columns]).reshape(-1)


def _agreed_rows(grid: fp8.U8, together: int, count: int) -> fp8.U8:
    """`count` rows, each for `together` equal rows of the grid; the last one may stand for fewer."""
    absent = count * together - len(grid)
    groups = np.concatenate([grid, np.repeat(grid[-1:], absent, axis=0)]).reshape(count, together, grid.shape[1])
    if (groups != groups[:, :1]).any():
        raise NoKernelScaleError("rows that share a block of 32 have different scales")
    return groups[:, 0]


def _exponents(raw: fp8.U8, dtype: str) -> fp8.U8:
    if dtype not in FLOAT_DTYPES:
        return raw
    mantissa, exponent = np.frexp(fp8.widen(raw, dtype).astype(np.float64))
    # frexp gives 0.5 * 2^exponent for a power of two, and e8m0 holds 2^-127 .. 2^127.
    if not ((mantissa == 0.5) & (exponent >= -126) & (exponent <= 128)).all():
        raise NoKernelScaleError("not every scale is a positive power of two")
    return (exponent + 126).astype(np.uint8)

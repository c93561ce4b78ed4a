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
from deepinfer_prep.quantized import (
    FLOAT_DTYPES,
    KERNEL_BLOCK,
    Element,
    QuantizedWeight,
    grid_shape,
    matrix_shape,
    tensor_nbytes,
)

KERNEL_ROWS, KERNEL_COLUMNS = 32, 128
"""The GEMM kernels take weights whose rows and columns are multiples of these."""
_BLOCK128 = 128
_E8M0_DTYPES = ("F8_E8M0", "U8")
_ROWS_AT_ONCE_BYTES = 4 * 1024 * 1024

ReadBytes = Callable[[int, int], fp8.U8]
"""Reads the bytes start..stop of a stored scale tensor."""


class NoKernelScaleError(ValueError):
    """The values of a scale have no kernel form; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The scale that the checkpoint stores has the kernels' form already and is used as it is."""


@dataclass(frozen=True, slots=True)
class Derived:
    """How one stored scale maps to the kernel's grid; only the values tell whether its `conditions` hold."""

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
class Absent:
    """No kernel scale exists for the weight; `reason` is a sentence part that says why."""

    reason: str


KernelScale = Stored | Derived | Absent
"""Where the kernel scale of a weight comes from."""


def describe(kernel_scale: KernelScale) -> str:
    """Where a kernel scale comes from, or the reason why there is none, as a sentence part."""
    if isinstance(kernel_scale, Absent):
        return kernel_scale.reason
    if isinstance(kernel_scale, Stored) or not kernel_scale.conditions:
        return "stored" if isinstance(kernel_scale, Stored) else "derived"
    return f"derived where {' and '.join(kernel_scale.conditions)}"


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """A quantized weight with what is known about its kernel scale before data is read."""

    quantized: QuantizedWeight
    kernel_scale: KernelScale


def plan_weight(checkpoint: Checkpoint, quantized: QuantizedWeight) -> PlannedWeight:
    """Plan the kernel scale of one weight of a checkpoint."""
    weight, scale = checkpoint.tensors[quantized.weight], checkpoint.tensors[quantized.scale]
    return PlannedWeight(quantized, plan_kernel_scale(quantized, weight, scale))


def plan_kernel_scale(quantized: QuantizedWeight, weight: TensorInfo, scale: TensorInfo) -> KernelScale:
    """Decide from names, shapes and the stated blocks where a weight's kernel scale comes from."""
    if quantized.no_kernel_scale:
        return Absent(quantized.no_kernel_scale)
    if quantized.block is None:
        return Absent(quantized.block_problem or "nothing states the block size")
    kernel_block = (1, KERNEL_BLOCK) if quantized.element == "e2m1" else (KERNEL_BLOCK, KERNEL_BLOCK)
    rows, columns = matrix_shape(weight.shape, quantized.element)
    kernel_shape = (*weight.shape[:-2], *grid_shape(rows, columns, kernel_block))
    if quantized.block == kernel_block and scale.dtype in _E8M0_DTYPES and scale.shape == kernel_shape:
        return Stored()
    if quantized.element == "e2m1":
        return Absent("an fp4 weight's kernel scale is one e8m0 byte a row and 32 columns")
    problem = _misaligned(quantized.block, rows, columns)
    if problem:
        return Absent(problem)
    matrices = math.prod(weight.shape[:-2])
    grid = grid_shape(rows, columns, quantized.block)
    if scale.elements != matrices * grid[0] * grid[1]:
        return Absent(f"the scale has {scale.elements:,} values where {matrices} x {grid} are needed")
    return Derived(scale.dtype, matrices, grid, quantized.block, rows, columns, kernel_shape)


def fits_block128(plan: Derived) -> bool:
    """Whether each value of the stored scale covers whole blocks of 128x128, for the kernel that takes float scales."""
    return plan.block[0] in (_BLOCK128, plan.rows) and plan.block[1] in (_BLOCK128, plan.columns)


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


def derive(plan: Derived, read: ReadBytes) -> Iterator[fp8.U8]:
    """Yield the kernel scale's bytes in order, some rows at a time, from the (doubled) stored scale.

    Raises:
        NoKernelScaleError: a value is no positive power of two, or the 32 rows of a block disagree.
    """
    columns = np.arange(plan.shape[-1]) * KERNEL_BLOCK // plan.block[1]
    for rows in _kernel_rows(plan, read):
        yield np.ascontiguousarray(rows[:, columns]).reshape(-1)


def resolve(plan: Derived, read: ReadBytes) -> Derived | Absent:
    """The plan where the values of the stored scale fulfil its conditions; nothing is read where there are none."""
    if not plan.conditions:
        return plan
    try:
        for _ in _kernel_rows(plan, read):
            pass
    except NoKernelScaleError as error:
        return Absent(str(error))
    return plan


def _kernel_rows(plan: Derived, read: ReadBytes) -> Iterator[fp8.U8]:
    """The kernel scale's rows, some at a time, with one byte for each column of the stored scale."""
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
            if grid_rows_per_kernel_row > 1:
                yield _agreed_rows(grid, grid_rows_per_kernel_row, last - first)
            else:
                yield grid[np.arange(first, last) * KERNEL_BLOCK // plan.block[0] - top]


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

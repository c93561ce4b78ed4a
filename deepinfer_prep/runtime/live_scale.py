"""The kernel scale of a weight that is in memory, from whatever scale the model holds for it.

The mapping itself is the converter's (`deepinfer_prep.kernel_scale`). What is settled here is which known grid
the scale of a live tensor has, padding and packing included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_prep.errors import PrepError
from deepinfer_prep.formats.base import grid_shape
from deepinfer_prep.kernel_scale import KERNEL_BLOCK, DerivedScale, NoKernelScaleError, derive
from deepinfer_prep.runtime import scales

_BLOCK128 = (128, 128)
_PADDED_ROWS = 128
"""Scale rows are padded up to a multiple of this at most (DeepGEMM pads to 4, CUTLASS to 128)."""


@dataclass(frozen=True, slots=True)
class KernelScales:
    """Exactly one of the two is there."""

    e8m0: torch.Tensor | None = None
    """uint8 [..., ceil(n/32), ceil(k/32)] for e4m3, [..., n, k/32] for e2m1."""
    block128: torch.Tensor | None = None
    """float32 [..., ceil(n/128), ceil(k/128)], where a 128x128 scale is no power of two."""


def e4m3_scales(weight: torch.Tensor, scale: torch.Tensor) -> KernelScales:
    """Kernel scales of an e4m3 weight [n, k] or [e, n, k].

    The result lies over the same memory as `scale` where that is the kernel form already.

    Raises:
        NoKernelScaleError: the scale has no kernel form; the message is the reason.
    """
    lead, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    grid, block = _known_grid(_unpacked(scale), lead, rows, columns)
    if block == (KERNEL_BLOCK, KERNEL_BLOCK) and grid.dtype == torch.uint8:
        return KernelScales(e8m0=grid.contiguous())
    kernel_grid = (*lead, *grid_shape(rows, columns, (KERNEL_BLOCK, KERNEL_BLOCK)))
    name = scales.FLOAT_NAMES.get(grid.dtype, "F8_E8M0")
    plan = DerivedScale(name, math.prod(lead), _last_two(grid), block, rows, columns, kernel_grid)
    stored = grid.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
    try:
        parts = list(derive(plan, lambda start, stop: stored[start:stop]))
    except NoKernelScaleError:
        if block == _BLOCK128 and grid.dtype != torch.uint8:
            return KernelScales(block128=grid.detach().float().contiguous())
        raise
    codes = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    return KernelScales(e8m0=torch.from_numpy(codes).reshape(kernel_grid).to(scale.device))


def e2m1_scales(weight: torch.Tensor, scale: torch.Tensor) -> KernelScales:
    """Kernel scales of an fp4 weight [n, k/2] or [e, n, k/2]: its e8m0 bytes, one a row and 32 columns.

    Raises:
        NoKernelScaleError: the scale is of another form; the message is the reason.
    """
    if scales.kind(scale) != "E8M0":
        raise NoKernelScaleError(f"int8 with scales of {scale.dtype} is no fp4 weight")
    lead, rows, columns = weight.shape[:-2], weight.shape[-2], weight.shape[-1] * 2
    grid, block = _known_grid(_unpacked(scale), lead, rows, columns)
    if block != (1, KERNEL_BLOCK):
        raise NoKernelScaleError(
            f"an fp4 weight of {rows} rows and {columns} columns has one scale byte a row and 32 columns, found "
            f"{list(scale.shape)}"
        )
    return KernelScales(e8m0=grid.contiguous())


def e8m0_values(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """float32 values of e8m0 scales for 1x32 blocks: [rows, ceil(columns / 32)], padding cropped.

    Raises:
        PrepError: `scale` has too few rows or columns, or is no form of e8m0 bytes.
    """
    needed = (rows, math.ceil(columns / KERNEL_BLOCK))
    codes = _unpacked(scale) if scales.kind(scale) == "E8M0" and scale.dim() == 2 else None
    if codes is None or codes.shape[0] < needed[0] or codes.shape[1] < needed[1]:
        raise PrepError(
            f"expected e8m0 scales of {list(needed)} for activations of [{rows}, {columns}], found {scale.dtype} "
            f"{list(scale.shape)}"
        )
    return codes[: needed[0], : needed[1]].view(torch.float8_e8m0fnu).float()


def _unpacked(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 forms as their bytes, the last axis longer where they are packed; floats as they are."""
    if scales.kind(scale) is None:
        raise NoKernelScaleError(f"{scale.dtype} is no known form of a scale")
    scale = scale.detach()
    if scale.dtype in scales.FLOAT_NAMES or scale.dtype == torch.uint8:
        return scale
    if scale.element_size() == 1:
        return scale.view(torch.uint8)
    if scale.dim() == 0:
        raise NoKernelScaleError(f"a packed scale has to have columns, found one {scale.dtype} value")
    return scale.contiguous().view(torch.uint8)


def _known_grid(scale: torch.Tensor, lead: torch.Size, rows: int, columns: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Crop padding off a scale and say what block each of its values covers.

    Rows may be scaled singly, by 32, by 128 or all alike, columns by 32, by 128 or all alike. Where two of
    these fit the shape they mean the same.
    """
    if scale.numel() == math.prod(lead) and (scale.dim() == 0 or scale.shape[: len(lead)] == lead):
        return scale.reshape(*lead, 1, 1), (rows, columns)
    if scale.dim() == len(lead) + 1 and scale.shape[-1] == rows:
        scale = scale.unsqueeze(-1)
    if scale.dim() != len(lead) + 2 or scale.shape[:-2] != lead:
        raise NoKernelScaleError(f"a scale of shape {list(scale.shape)} fits no weight of {[*lead, rows, columns]}")
    found_rows, found_columns = _last_two(scale)
    by_32 = math.ceil(columns / KERNEL_BLOCK)
    if rows < found_rows <= math.ceil(rows / _PADDED_ROWS) * _PADDED_ROWS and found_columns >= by_32:
        found_rows = rows
    row_block = next((b for b in (1, 32, 128, rows) if math.ceil(rows / b) == found_rows), None)
    column_block = next((b for b in (32, 128, columns) if math.ceil(columns / b) == found_columns), None)
    if column_block is None and row_block == 1 and by_32 < found_columns < by_32 + 4:
        found_columns, column_block = by_32, KERNEL_BLOCK
    if row_block is None or column_block is None:
        raise NoKernelScaleError(
            f"a scale of {list(scale.shape)} has no known grid for a weight of {[*lead, rows, columns]}: rows are "
            "scaled singly, by 32, by 128 or all alike, columns by 32, by 128 or all alike"
        )
    return scale[..., :found_rows, :found_columns], (row_block, column_block)


def _last_two(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[-2], tensor.shape[-1]

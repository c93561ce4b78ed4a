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
from deepinfer_prep.kernel_scale import Derived, NoKernelScaleError, derive
from deepinfer_prep.quantized import KERNEL_BLOCK, grid_shape
from deepinfer_prep.runtime import held_tensors
from deepinfer_prep.runtime.dtypes import FLOAT_NAMES

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
    lead, (rows, columns) = weight.shape[:-2], _last_two(weight)
    grid, block = _known_grid(scale, lead, rows, columns)
    if block == (KERNEL_BLOCK, KERNEL_BLOCK) and grid.dtype == torch.uint8:
        return KernelScales(e8m0=grid.contiguous())
    kernel_grid = (*lead, *grid_shape(rows, columns, (KERNEL_BLOCK, KERNEL_BLOCK)))
    name = FLOAT_NAMES.get(grid.dtype, "F8_E8M0")
    plan = Derived(name, math.prod(lead), _last_two(grid), block, rows, columns, kernel_grid)
    stored = _row_major(grid.cpu()).view(torch.uint8).numpy().reshape(-1)
    try:
        codes = np.concatenate(list(derive(plan, lambda start, stop: stored[start:stop])))
    except NoKernelScaleError:
        block128 = _block128(grid, block, rows, columns)
        if block128 is None:
            raise
        return KernelScales(block128=block128)
    return KernelScales(e8m0=torch.from_numpy(codes).reshape(kernel_grid).to(scale.device))


def _block128(grid: torch.Tensor, block: tuple[int, int], rows: int, columns: int) -> torch.Tensor | None:
    """Float scales as float32 of 128x128 blocks, where they are of such blocks or larger and finite."""
    if grid.dtype == torch.uint8 or block[0] not in (128, rows) or block[1] not in (128, columns):
        return None
    if not bool(grid.isfinite().all()):
        return None
    by_row = torch.arange(0, rows, 128, device=grid.device) // block[0]
    by_column = torch.arange(0, columns, 128, device=grid.device) // block[1]
    return grid.float().index_select(-2, by_row).index_select(-1, by_column)


def e2m1_scales(weight: torch.Tensor, scale: torch.Tensor) -> KernelScales:
    """Kernel scales of an fp4 weight [n, k/2] or [e, n, k/2]: its e8m0 bytes, one a row and 32 columns.

    Raises:
        NoKernelScaleError: the scale is of another form; the message is the reason.
    """
    if held_tensors.kind(scale) != "E8M0":
        raise NoKernelScaleError(f"int8 with scales of {scale.dtype} is no fp4 weight")
    lead, rows, columns = weight.shape[:-2], weight.shape[-2], weight.shape[-1] * 2
    grid, block = _known_grid(scale, lead, rows, columns)
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
    codes = _unpacked(scale) if held_tensors.kind(scale) == "E8M0" and scale.dim() == 2 else None
    if codes is None or codes.shape[0] < needed[0] or codes.shape[1] < needed[1]:
        raise PrepError(
            f"expected e8m0 scales of {list(needed)} for activations of [{rows}, {columns}], found {scale.dtype} "
            f"{list(scale.shape)}"
        )
    return codes[: needed[0], : needed[1]].view(torch.float8_e8m0fnu).float()


def _unpacked(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 forms as their bytes, the last axis longer where they are packed; floats as they are."""
    if held_tensors.kind(scale) is None:
        raise NoKernelScaleError(f"{scale.dtype} is no known form of a scale")
    scale = scale.detach()
    if scale.dtype in FLOAT_NAMES:
        return scale
    if scale.element_size() == 1:
        return scale.view(torch.uint8)
    if scale.dim() == 0:
        raise NoKernelScaleError(f"a packed scale has to have columns, found one {scale.dtype} value")
    return _row_major(scale).view(torch.uint8)


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    # Not contiguous(), which leaves any stride on an axis of one element, and view() then refuses.
    return tensor.clone(memory_format=torch.contiguous_format)


def _known_grid(scale: torch.Tensor, lead: torch.Size, rows: int, columns: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """The values of a scale without padding, e8m0 as bytes, and the block of the weight that each covers.

    Rows may be scaled singly, by 32, by 128 or all alike, columns by 32, by 128 or all alike. Where two of
    these fit the shape they mean the same.
    """
    values = _unpacked(scale)
    if values.numel() == math.prod(lead) and (values.dim() == 0 or values.shape[: len(lead)] == lead):
        return values.reshape(*lead, 1, 1), (rows, columns)
    if values.dim() == len(lead) + 1 and values.shape[-1] == rows:
        values = values.unsqueeze(-1)
    if values.dim() != len(lead) + 2 or values.shape[:-2] != lead:
        raise NoKernelScaleError(f"a scale of shape {list(scale.shape)} fits no weight of {[*lead, rows, columns]}")
    word = 1 if scale.dtype in FLOAT_NAMES else scale.element_size()
    values = _without_padding(values, word, rows, math.ceil(columns / KERNEL_BLOCK))
    found_rows, found_columns = _last_two(values)
    row_block = next((b for b in (1, 32, 128, rows) if math.ceil(rows / b) == found_rows), None)
    column_block = next((b for b in (32, 128, columns) if math.ceil(columns / b) == found_columns), None)
    if row_block is None or column_block is None:
        raise NoKernelScaleError(
            f"a scale of {list(scale.shape)} has no known grid for a weight of {[*lead, rows, columns]}: rows are "
            "scaled singly, by 32, by 128 or all alike, columns by 32, by 128 or all alike"
        )
    return values, (row_block, column_block)


def _without_padding(values: torch.Tensor, word: int, rows: int, by_32: int) -> torch.Tensor:
    """Crop the padding of scales that have one value a row and 32 columns: whole words, aligned rows."""
    found_rows, found_columns = _last_two(values)
    if found_columns != math.ceil(by_32 / word) * word or found_rows > math.ceil(rows / _PADDED_ROWS) * _PADDED_ROWS:
        return values
    return values[..., : min(rows, found_rows), :by_32]


def _last_two(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[-2], tensor.shape[-1]

"""What is attached to a weight besides its values: its scale, its kernel scale, hi and lo of a split matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from deepinfer_prep.manifest import WeightRecord
from deepinfer_prep.quantized import KERNEL_BLOCK
from deepinfer_prep.runtime.dtypes import FLOAT_NAMES, holds_same_bytes
from deepinfer_prep.runtime.loading.assembly import (
    Assembly,
    AssemblyError,
    PlacedPart,
    SourcePart,
    as_grid,
    assemble,
    pad_rows,
    row_axis,
)
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.scale_form import AS_STORED, ScaleForm
from deepinfer_prep.runtime.loading.slices import Slice, part_shape
from deepinfer_prep.runtime.loading.slots import Slot

_BLOCK128 = 128


@dataclass(frozen=True, slots=True)
class Block128Rows:
    """How float scales become one value for each 128x128 block: which row and column of the scale each one takes."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def apply(self, scale: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
        """The block scale, float32 [*lead, rows, columns], over the same memory where nothing has to be changed."""
        grid = scale.detach().reshape(*lead, max(self.rows) + 1, max(self.columns) + 1).float()
        if self.rows != tuple(range(grid.shape[-2])):
            grid = grid.index_select(-2, torch.tensor(self.rows, device=grid.device))
        if self.columns != tuple(range(grid.shape[-1])):
            grid = grid.index_select(-1, torch.tensor(self.columns, device=grid.device))
        return grid


@dataclass(frozen=True, slots=True, eq=False)
class Attachments:
    """What to attach to one slot; everything is None for a tensor that is neither quantized nor split."""

    scale: Assembly | None = None
    form: ScaleForm = AS_STORED
    """The form in which the scale is attached."""
    scale_slot: Slot | None = None
    """The model's own place for the scale, which is attached then."""
    kernel_scale: Assembly | None = None
    """A kernel scale with bytes of its own."""
    scale_is_kernel_scale: bool = False
    block128: Block128Rows | None = None
    """How the kernels' scale of 128x128 blocks follows from the scale; None where there is none."""
    hi_lo: tuple[Assembly, Assembly] | None = None


def attachments_of(
    checkpoint: PreparedCheckpoint, value: Assembly, scale_slot: Callable[[str], Slot | None], form: ScaleForm
) -> Attachments:
    """Plan what belongs to an assembled tensor.

    Args:
        scale_slot: where a scale goes that is loaded into the model itself.
        form: how the scale is attached where it goes nowhere itself.

    Raises:
        AssemblyError: the pieces' scales cannot be put together.
        ScaleFormError: the scale has no such form.
        SliceError: a piece cuts through a block that shares a scale.
    """
    manifest = checkpoint.manifest
    names = [place.piece.name for place in value.places]
    records = [manifest.weights[name] for name in names if name in manifest.weights]
    splits = [manifest.split[name] for name in names if name in manifest.split]
    if len(splits) == len(names):
        hi, lo = ([getattr(split, part) for split in splits] for part in ("hi", "lo"))
        return Attachments(hi_lo=(_alongside(checkpoint, value, hi), _alongside(checkpoint, value, lo)))
    if not records:
        return Attachments()
    if len(records) != len(names) or len({record.element for record in records}) > 1:
        raise AssemblyError(f"{value.sources} are quantized in different ways, so they cannot share a parameter")
    return _Scales(checkpoint, value, records).attachments({scale_slot(record.scale) for record in records}, form)


class _Scales:
    """The scales of the pieces of one assembled weight."""

    def __init__(self, checkpoint: PreparedCheckpoint, value: Assembly, records: Sequence[WeightRecord]) -> None:
        self._checkpoint, self._value, self._records = checkpoint, value, records
        self._parts = self._sources([record.scale for record in records], checkpoint.scale_part)
        self._are_single_values = all(math.prod(part.shape) == 1 for part in self._parts)

    def attachments(self, slots: set[Slot | None], form: ScaleForm) -> Attachments:
        slot = slots.pop() if len(slots) == 1 else None
        scale = self._scale()
        if slot is None:
            form.check(scale.dtype, scale.shape)
        has_kernel_form = all(record.kernel_scale == record.scale for record in self._records)
        kernel_scale = scale if has_kernel_form and self._is_whole_matrix() else self._kernel_scale()
        is_stored = kernel_scale is not None and has_kernel_form
        is_shared = is_stored and (slot is None or holds_same_bytes(scale.dtype, slot.tensor.dtype))
        return Attachments(
            scale=scale,
            form=form,
            scale_slot=slot,
            kernel_scale=None if is_shared else kernel_scale,
            scale_is_kernel_scale=is_shared,
            block128=self._block128(scale) if kernel_scale is None else None,
        )

    def _scale(self) -> Assembly:
        blocks = {record.block for record in self._records}
        if len(blocks) > 1 and not self._are_single_values:
            raise AssemblyError(
                f"{self._value.sources} are quantized in different blocks ({_listed_blocks(blocks)}), so they cannot "
                "share a parameter"
            )
        block = self._records[0].block
        if not self._are_single_values:
            self._check_whole_blocks(None if block is None else block[0])
        scale = assemble(as_grid(self._parts), _one_dtype(self._checkpoint, [part.name for part in self._parts]))
        return self._padded(scale, None if block is None else block[0], self._are_single_values)

    def _is_whole_matrix(self) -> bool:
        """Whether the weight is one tensor, or matrices of one, as it is stored: the most common case by far."""
        value = self._value
        return (
            value.is_single
            and value.padding is None
            and len(value.shape) in (2, 3)
            and value.places[0].piece.part.is_whole
        )

    def _kernel_scale(self) -> Assembly | None:
        """The scale of the kernels' own form, where all pieces have one and these can be put together."""
        names = [record.kernel_scale for record in self._records if record.kernel_scale is not None]
        if len(names) < len(self._records) or len(self._value.shape) not in (2, 3):
            return None
        row_block = 1 if self._records[0].element == "e2m1" else KERNEL_BLOCK
        if self._are_single_values and any(before.piece.shape[-2] % row_block for before, _ in self._neighbours()):
            return None
        self._check_whole_blocks(row_block)
        parts = self._sources(names, self._checkpoint.kernel_scale_part)
        assembled = assemble(as_grid(parts), _one_dtype(self._checkpoint, names))
        return self._padded(assembled, row_block, is_single_value=False)

    def _block128(self, scale: Assembly) -> Block128Rows | None:
        if self._records[0].element != "e4m3" or scale.dtype not in FLOAT_NAMES or len(self._value.shape) not in (2, 3):
            return None
        if scale.padding is not None or 0 in self._value.shape:
            return None
        rows: list[int] = []
        columns: tuple[int, ...] = ()
        # All experts are put together alike, so one stands for all.
        first = self._value.places[0].piece.target.expert
        places = [place for place in self._value.places if place.piece.target.expert == first]
        for number, (place, record) in enumerate(zip(places, self._records, strict=False)):
            height, width = place.piece.shape[-2:]
            block = (height, width) if self._are_single_values else record.block
            if block is None or not (_fits(block[0], height) and _fits(block[1], width)):
                return None
            if number + 1 < len(places) and height % _BLOCK128:
                return None
            above = rows[-1] + 1 if rows else 0
            rows += (above + row // block[0] for row in range(0, height, _BLOCK128))
            columns = tuple(column // block[1] for column in range(0, width, _BLOCK128))
        return Block128Rows(tuple(rows), columns)

    def _sources(self, names: Sequence[str], part_of: Callable[[str, Slice], Slice]) -> list[SourcePart]:
        """The part of each tensor that belongs to the piece of the same number."""
        parts = []
        for place, name in zip(self._value.places, names, strict=True):
            part = place.piece.part if place.piece.part.is_whole else part_of(place.piece.name, place.piece.part)
            stored, grid = self._checkpoint.tensor(name).shape, self._checkpoint.grid(name)
            shape = part_shape(part, grid, name)
            other = stored if part.is_whole and stored != grid else None
            parts.append(SourcePart(name, part, shape, place.piece.target, other))
        return parts

    def _neighbours(self) -> Iterator[tuple[PlacedPart, PlacedPart]]:
        """Pieces of which the second is stacked below the first."""
        for before, after in pairwise(self._value.places):
            if before.piece.target.expert == after.piece.target.expert:
                yield before, after

    def _check_whole_blocks(self, row_block: int | None) -> None:
        """Of weights stacked by rows each but the last one has to end with a whole block."""
        for before, after in self._neighbours():
            rows = before.piece.shape[-2] if len(before.piece.shape) > 1 else 1
            if row_block is None or rows % row_block:
                unit = "an unknown number of rows" if row_block is None else f"{row_block} rows"
                raise AssemblyError(
                    f"{before.piece.name!r} has {rows} rows and {after.piece.name!r} follows, but {unit} share a scale "
                    "value, so their scales cannot be stacked"
                )

    def _padded(self, scale: Assembly, row_block: int | None, is_single_value: bool) -> Assembly:
        """The scale of a padded weight, with a value of one for each block of padding."""
        if self._value.padding is None or (is_single_value and len(self._parts) == 1):
            return scale
        if row_block is None or is_single_value or len(scale.shape) < 2:
            raise AssemblyError(f"{self._value.sources} cannot be padded: nothing says which scale padding would have")
        return pad_rows(scale, math.ceil(self._value.shape[row_axis(self._value.shape)] / row_block), is_scale=True)


def _fits(block: int, size: int) -> bool:
    """Whether a block of 128 lies in one block of the scale, along an axis of a weight."""
    return block == _BLOCK128 or block >= size


def _listed_blocks(blocks: set[tuple[int, int] | None]) -> str:
    return " and ".join(sorted("unknown" if block is None else f"{block[0]}x{block[1]}" for block in blocks))


def _alongside(checkpoint: PreparedCheckpoint, value: Assembly, names: list[str]) -> Assembly:
    """Tensors of the same shapes as the pieces, in the same places."""
    places = tuple(
        PlacedPart(SourcePart(name, place.piece.part, place.piece.shape, place.piece.target), place.at)
        for place, name in zip(value.places, names, strict=True)
    )
    return Assembly(_one_dtype(checkpoint, names), value.shape, places, value.padding)


def _one_dtype(checkpoint: PreparedCheckpoint, names: Sequence[str]) -> torch.dtype:
    dtypes = {checkpoint.tensor(name).dtype for name in names}
    if len(dtypes) > 1:
        raise AssemblyError(f"{', '.join(map(repr, names[:3]))} have different dtypes")
    return dtypes.pop()

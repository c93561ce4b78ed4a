"""What is attached to a weight besides its values: its scale, its kernel scale, hi and lo of a split matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from deepinfer_prep.manifest import WeightRecord
from deepinfer_prep.quantized import KERNEL_BLOCK
from deepinfer_prep.runtime.dtypes import FLOAT_NAMES
from deepinfer_prep.runtime.loading.assembly import Assembly, AssemblyError, PlacedPart, SourcePart, as_grid, assemble
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.slices import Slice, part_shape
from deepinfer_prep.runtime.loading.slots import Slot

_FLOAT_KERNEL_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True, eq=False)
class Attachments:
    """What to attach to one slot; everything is None for a tensor that is neither quantized nor split."""

    scale: Assembly | None = None
    scale_slot: Slot | None = None
    """The model's own place for the scale, which is attached then."""
    kernel_scale: Assembly | None = None
    """A kernel scale with bytes of its own."""
    scale_is_kernel_scale: bool = False
    scale_is_block128: bool = False
    """Float scales of 128x128 blocks, which kernels take as float32."""
    hi_lo: tuple[Assembly, Assembly] | None = None


def attachments_of(checkpoint: PreparedCheckpoint, value: Assembly, slot_of: Mapping[str, Slot]) -> Attachments:
    """Plan what belongs to an assembled tensor.

    Args:
        slot_of: where tensors that go into the model themselves go, by their names.

    Raises:
        AssemblyError: the pieces' scales cannot be put together.
        SliceError: a piece cuts through a block that shares a scale.
    """
    manifest = checkpoint.manifest
    names = [place.piece.name for place in value.places]
    records = [manifest.weights[name] for name in names if name in manifest.weights]
    splits = [manifest.split[name] for name in names if name in manifest.split]
    if len(splits) == len(names):
        hi, lo = ([getattr(split, half) for split in splits] for half in ("hi", "lo"))
        return Attachments(hi_lo=(_alongside(checkpoint, value, hi), _alongside(checkpoint, value, lo)))
    if not records:
        return Attachments()
    if len(records) != len(names) or len({(record.element, record.block) for record in records}) > 1:
        raise AssemblyError(f"{value.sources} are quantized in different ways, so they cannot share a parameter")
    return _quantized(checkpoint, value, records, slot_of)


def _quantized(
    checkpoint: PreparedCheckpoint, value: Assembly, records: list[WeightRecord], slot_of: Mapping[str, Slot]
) -> Attachments:
    first = records[0]
    row_block = None if first.block is None else first.block[0]
    scale = _scales(checkpoint, value, [record.scale for record in records], checkpoint.scale_part, row_block)
    slots = {slot_of.get(record.scale) for record in records}
    kernel_scales = [record.kernel_scale for record in records if record.kernel_scale is not None]
    is_prepared = len(kernel_scales) == len(records) and len(value.shape) in (2, 3)
    is_shared = is_prepared and all(record.kernel_scale == record.scale for record in records)
    kernel_scale = None
    if is_prepared and not is_shared:
        row_block = 1 if first.element == "e2m1" else KERNEL_BLOCK
        kernel_scale = _scales(checkpoint, value, kernel_scales, checkpoint.kernel_scale_part, row_block)
    return Attachments(
        scale=scale,
        scale_slot=slots.pop() if len(slots) == 1 else None,
        kernel_scale=kernel_scale,
        scale_is_kernel_scale=is_shared,
        scale_is_block128=not is_prepared and first.block == _FLOAT_KERNEL_BLOCK and scale.dtype in FLOAT_NAMES,
    )


def _scales(
    checkpoint: PreparedCheckpoint,
    value: Assembly,
    names: list[str],
    part_of: Callable[[str, Slice], Slice],
    row_block: int | None,
) -> Assembly:
    """Put the scales of the pieces together as the pieces are."""
    _check_block_rows(value, row_block)
    pieces = []
    for place, name in zip(value.places, names, strict=True):
        part = part_of(place.piece.name, place.piece.part)
        shape = part_shape(part, checkpoint.tensor(name).shape, name)
        pieces.append(SourcePart(name, part, shape, place.piece.target))
    return assemble(as_grid(pieces), _one_dtype(checkpoint, names))


def _check_block_rows(value: Assembly, row_block: int | None) -> None:
    """Of weights stacked by rows each but the last one has to end with a whole block."""
    for place, after in pairwise(value.places):
        rows = place.piece.shape[-2] if len(place.piece.shape) > 1 else 1
        if place.piece.target.expert == after.piece.target.expert and (row_block is None or rows % row_block):
            unit = "an unknown number of rows" if row_block is None else f"{row_block} rows"
            raise AssemblyError(
                f"{place.piece.name!r} has {rows} rows and {after.piece.name!r} follows, but {unit} share a scale "
                "value, so their scales cannot be stacked"
            )


def _alongside(checkpoint: PreparedCheckpoint, value: Assembly, names: list[str]) -> Assembly:
    """Tensors of the same shapes as the pieces, in the same places."""
    places = tuple(
        PlacedPart(SourcePart(name, place.piece.part, place.piece.shape, place.piece.target), place.at)
        for place, name in zip(value.places, names, strict=True)
    )
    return Assembly(_one_dtype(checkpoint, names), value.shape, places)


def _one_dtype(checkpoint: PreparedCheckpoint, names: list[str]) -> torch.dtype:
    dtypes = {checkpoint.tensor(name).dtype for name in names}
    if len(dtypes) > 1:
        raise AssemblyError(f"{', '.join(map(repr, names[:3]))} have different dtypes")
    return dtypes.pop()

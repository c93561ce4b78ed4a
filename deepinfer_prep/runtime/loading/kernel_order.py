"""Weights that go into a model in the kernels' order: which they are, and how their pieces become one weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.kernel_layout import Band, bands, weight_to_kernel_order
from deepinfer_prep.kernels.constants import K_MULTIPLE, N_MULTIPLE
from deepinfer_prep.quantized import matrix_shape
from deepinfer_prep.runtime.loading.assembly import Assembly, SourcePart
from deepinfer_prep.runtime.loading.attachments import Attachments
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.slices import bounds_of


@dataclass(frozen=True, slots=True, eq=False)
class KernelOrder:
    """A weight that goes into a model as bytes in the kernels' order."""

    weight: BandedWeight
    stored: Assembly | None
    """The bytes that are stored for its pieces, where these one after the other are the weight already. Otherwise the
    pieces are read row-major, and the weight is put into the kernels' order in memory."""


def kernel_order_of(checkpoint: PreparedCheckpoint, value: Assembly, attachments: Attachments) -> KernelOrder | None:
    """Whether, and how, an assembled weight goes into a model in the kernels' order.

    It does where all of its pieces are stored in that order and a kernel takes what they make up; a part of a weight
    may have a shape that none takes, and pieces may have scales that cannot be put together for one.
    """
    records = [checkpoint.manifest.weights.get(place.piece.name) for place in value.places]
    elements = {record.element for record in records if record is not None and record.layout is not None}
    is_taken = attachments.scale_is_kernel_scale or attachments.kernel_scale is not None or attachments.block128
    if len(elements) != 1 or any(record is None or record.layout is None for record in records):
        return None
    element = elements.pop()
    rows, columns = matrix_shape(value.shape, element)
    if not is_taken or value.padding is not None or rows % N_MULTIPLE or columns % K_MULTIPLE or 0 in value.shape:
        return None
    weight = BandedWeight(value.shape, element)
    pieces = [place.piece for place in value.places]
    has_bands = all(_has_bands(checkpoint, group, rows) for group in _matrices(pieces))
    return KernelOrder(weight, _as_stored(checkpoint, value) if has_bands else None)


def reorder(weight: BandedWeight, content: torch.Tensor) -> None:
    """Put a row-major weight, uint8 on the CPU and contiguous, into the kernels' order where it is."""
    for matrix in content.view(-1, weight.rows, weight.row_bytes).numpy():
        matrix[:] = weight_to_kernel_order(matrix, weight.content)


def _matrices(pieces: Sequence[SourcePart]) -> Iterator[list[SourcePart]]:
    """The pieces that make up each matrix, in the order of their rows."""
    by_expert: dict[int | None, list[SourcePart]] = {}
    for piece in pieces:
        by_expert.setdefault(piece.target.expert, []).append(piece)
    yield from by_expert.values()


def _has_bands(checkpoint: PreparedCheckpoint, pieces: Sequence[SourcePart], rows: int) -> bool:
    """Whether the bands of pieces one below the other are those of a weight of so many rows."""
    found: list[Band] = []
    at = 0
    for piece in pieces:
        tensor = checkpoint.tensor(piece.name)
        assert tensor.banded is not None
        first, last = bounds_of(piece.part, tensor.shape, piece.name)[-2]
        found += tensor.banded.bands_in((first, last), at)
        at += last - first
    return tuple(found) == bands(rows)


def _as_stored(checkpoint: PreparedCheckpoint, value: Assembly) -> Assembly:
    def stored(piece: SourcePart) -> SourcePart:
        return piece._replace(name=checkpoint.record(piece.name).tensor(piece.name))

    places = tuple(place._replace(piece=stored(place.piece)) for place in value.places)
    return Assembly(torch.uint8, value.shape, places)

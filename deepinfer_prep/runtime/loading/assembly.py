"""How tensors of a checkpoint make up one tensor of a model: stacked by rows, by experts, or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from deepinfer_prep.errors import list_some
from deepinfer_prep.runtime.loading.slices import Slice


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of the checkpoint goes in a model.

    Tensors for one parameter (and, where given, one expert) are stacked along their rows in the order of
    `part`, each as large as it is: `Target("w13", part=0)` and `Target("w13", part=1)` fill [n1 + n3, k].
    With `expert`, tensors [n, k] fill one matrix of a parameter [experts, n, k].
    """

    parameter: str
    expert: int | None = None
    part: int = 0

    def __post_init__(self) -> None:
        if self.expert is not None and self.expert < 0:
            raise ValueError(f"{self}: experts count from 0; return None for a tensor that this rank does not take")


class SourcePart(NamedTuple):
    """A part of a stored tensor on its way to a target."""

    name: str
    part: Slice
    shape: tuple[int, ...]
    """What it fills."""
    target: Target
    stored_shape: tuple[int, ...] | None = None
    """The part's own shape, where that is another one of as many elements."""


class Padding(NamedTuple):
    """The rows from `start` on are padding: zeros, or ones for a scale, in which zero would mean nothing."""

    start: int
    is_scale: bool


class PlacedPart(NamedTuple):
    """Where a piece lies in the assembled tensor; an empty `at` is all of it."""

    piece: SourcePart
    at: tuple[int | slice, ...]


class Assembly(NamedTuple):
    """A tensor put together from pieces that tile it, but for rows of padding at its end."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[PlacedPart, ...]
    padding: Padding | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(math.prod(place.piece.shape) for place in self.places) * self.dtype.itemsize

    @property
    def is_single(self) -> bool:
        """Whether it is one piece as it is."""
        return len(self.places) == 1 and not self.places[0].at

    @property
    def sources(self) -> str:
        """Names for messages."""
        names = [place.piece.name for place in self.places]
        return list_some(names, 3, repr)


class AssemblyError(ValueError):
    """The pieces do not make up one tensor; the message says why."""


def assemble(pieces: Sequence[SourcePart], dtype: torch.dtype) -> Assembly:
    """Lay pieces of one dtype out.

    Raises:
        AssemblyError: two pieces want one place, an expert is absent, or shapes do not fit together.
    """
    if len(pieces) == 1 and pieces[0].target.expert is None:
        return Assembly(dtype, pieces[0].shape, (PlacedPart(pieces[0], ()),))
    ordered = sorted(pieces, key=lambda piece: (piece.target.expert is not None, _position(piece)))
    if ordered[-1].target.expert is None:
        shape, places = _stack(ordered, ())
        return Assembly(dtype, shape, tuple(places))
    groups: dict[int | None, list[SourcePart]] = {}
    for piece in ordered:
        groups.setdefault(piece.target.expert, []).append(piece)
    absent = [expert for expert in range(_count(groups)) if expert not in groups]
    if None in groups or absent:
        which = f"expert {absent[0]}" if absent else "some tensors"
        raise AssemblyError(f"{which} of {_named(ordered)} have no place of their own among the experts")
    stacks = [_stack(group, (expert,)) for expert, group in groups.items() if expert is not None]
    shapes = {shape for shape, _ in stacks}
    if len(shapes) > 1:
        raise AssemblyError(f"the experts of {_named(ordered)} have different shapes: {sorted(shapes)}")
    return Assembly(dtype, (len(stacks), *shapes.pop()), tuple(place for _, places in stacks for place in places))


def as_grid(pieces: Sequence[SourcePart]) -> list[SourcePart]:
    """Scale pieces that are to be put together, as matrices: one value is [1, 1], one a row [rows, 1]."""
    if len(pieces) == 1 and pieces[0].target.expert is None:
        return list(pieces)
    return [one._replace(shape=_grid_shape(one.shape), stored_shape=one.stored_shape or one.shape) for one in pieces]


def pad_rows(assembly: Assembly, rows: int, is_scale: bool) -> Assembly:
    """The same tensor with padding up to `rows` rows (of each matrix, in a stack of matrices)."""
    axis = row_axis(assembly.shape)
    start = assembly.shape[axis]
    if start == rows:
        return assembly
    places = [
        place if len(place.at) > axis else place._replace(at=(*place.at, *_all(axis - len(place.at)), slice(0, start)))
        for place in assembly.places
    ]
    shape = (*assembly.shape[:axis], rows, *assembly.shape[axis + 1 :])
    return Assembly(assembly.dtype, shape, tuple(places), Padding(start, is_scale))


def row_axis(shape: tuple[int, ...]) -> int:
    """The axis along which tensors are stacked: the last but one, or the only one."""
    return max(0, len(shape) - 2)


def _all(axes: int) -> tuple[slice, ...]:
    return (slice(None),) * axes


def _grid_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, *(1,) * (2 - len(shape))) if len(shape) < 2 else shape


def _position(piece: SourcePart) -> tuple[int, int]:
    return piece.target.expert or 0, piece.target.part


def _count(groups: dict[int | None, list[SourcePart]]) -> int:
    return 1 + max(expert for expert in groups if expert is not None)


def _stack(pieces: list[SourcePart], prefix: tuple[int, ...]) -> tuple[tuple[int, ...], list[PlacedPart]]:
    """Stack along rows; `prefix` is the index of the expert."""
    first = pieces[0]
    if len(pieces) == 1:
        return first.shape, [PlacedPart(first, prefix)]
    axis = row_axis(first.shape)
    places, row = [], 0
    for before, piece in pairwise(pieces):
        if before.target.part == piece.target.part:
            raise AssemblyError(f"{before.name!r} and {piece.name!r} both want the same place")
    for piece in pieces:
        if not first.shape or len(piece.shape) != len(first.shape) or _others(piece, axis) != _others(first, axis):
            raise AssemblyError(
                f"{first.name!r} of shape {list(first.shape)} and {piece.name!r} of shape {list(piece.shape)} "
                "cannot be stacked along rows"
            )
        rows = slice(row, row + piece.shape[axis])
        places.append(PlacedPart(piece, (*prefix, *_all(axis), rows)))
        row = rows.stop
    return (*first.shape[:axis], row, *first.shape[axis + 1 :]), places


def _others(piece: SourcePart, axis: int) -> tuple[int, ...]:
    return piece.shape[:axis] + piece.shape[axis + 1 :]


def _named(pieces: Sequence[SourcePart]) -> str:
    return f"{pieces[0].name!r} to {pieces[-1].name!r}"

"""How the tensors of a call are handed to a graph that takes contiguous tensors which share no storage.

Trainium takes contiguous tensors only, and a compiler does not know that two inputs share memory. So a
contiguous input is handed over as it is, and one whose elements fill a range of memory in another order is
permuted, without a copy. The rest is handed over as ranges of bytes: an input with gaps as the range that
its rows lie in, and all inputs that share storage with one that is written to as one common range. The graph
takes each of them out of its range by views and slices, so that what it writes lands in the range.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deepinfer_prep.runtime.backend.byte_formats import CARRIER, carried

_ALIGNMENT = 16
"""Where a range with several element types starts: a multiple of every element size."""


@dataclass(frozen=True)
class Whole:
    """An argument handed over by itself: as it is, permuted, or copied where nothing else is possible."""

    index: int
    permutation: tuple[int, ...] | None = None
    copied: bool = False


@dataclass(frozen=True)
class ByteRange:
    """`length` bytes of the storage of argument `index`, from `before` bytes before its first element."""

    index: int
    before: int
    length: int


@dataclass(frozen=True)
class Nest:
    """A strided tensor as nested rows: what to view a range as, and which part of each dimension to take.

    shape: the rows from outer to inner; the last dimension is what lies between neighbouring elements.
    starts, sizes: the part of each dimension but the last. last: the index in the last dimension.
    order: the place of each of the tensor's dimensions among those parts, -1 for one to be inserted.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    last: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """An argument that lies in a byte range, `begin` bytes from its start, for `length` bytes."""

    source: int
    begin: int
    length: int
    dtype: torch.dtype
    nest: Nest
    shape: tuple[int, ...]


Source = Whole | ByteRange


@dataclass(frozen=True)
class Layout:
    """sources: what is handed over. parts: where each argument is found, None for a source of its own."""

    sources: tuple[Source, ...]
    parts: tuple[Part | None, ...]

    @property
    def is_trivial(self) -> bool:
        """Whether every argument is handed over as it is."""
        return all(isinstance(source, Whole) and source.permutation is None for source in self.sources)

    def lowering(self, args: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """A function from the arguments of a call to what is handed over: bytes for fp8, on the same storage.

        args: arguments of the types and shapes that the function will be called with.
        """
        indices = [source.index for source in self.sources]
        changed = [(place, source) for place, source in enumerate(self.sources) if _changes(source, args)]

        def lower(args: Sequence[Any]) -> list[Any]:
            lowered = [args[index] for index in indices]
            for place, source in changed:
                lowered[place] = _lower(source, lowered[place])
            return lowered

        return lower


class StridedWriteError(Exception):
    """An argument that is written to lies in memory in a way that no view of a range describes."""

    def __init__(self, index: int) -> None:
        self.index = index
        super().__init__(index)


def as_bytes(tensor: Tensor) -> Tensor:
    """The uint8 view of an fp8 tensor on the same storage; any other tensor itself."""
    return tensor.view(CARRIER) if carried(tensor) is not None else tensor


def _changes(source: Source, args: Sequence[Any]) -> bool:
    plain = isinstance(source, Whole) and source.permutation is None and not source.copied
    return not plain or carried(args[source.index]) is not None


def _lower(source: Source, arg: Tensor) -> Tensor:
    if isinstance(source, ByteRange):
        start = arg.storage_offset() * arg.element_size() - source.before
        return torch.empty(0, dtype=CARRIER, device=arg.device).set_(
            arg.untyped_storage(), start, (source.length,), (1,)
        )
    lowered = as_bytes(arg)
    if source.permutation is not None:
        return lowered.permute(source.permutation)
    return lowered.contiguous() if source.copied else lowered


def plan_layout(args: Sequence[Any], written: Sequence[int], considered: Iterable[int] | None = None) -> Layout:
    """The layout for the arguments of a call, of which those at `written` are written to.

    considered: the arguments to lay out, in ascending order; all of them by default.

    :raises StridedWriteError: if one of those that are written to cannot be described.
    """
    considered = range(len(args)) if considered is None else list(considered)
    shared = _shared_with_written(args, written, considered)
    sources: list[Source] = []
    parts: list[Part | None] = [None] * len(args)
    for index in considered:
        arg = args[index]
        if index in shared:
            continue
        source = _alone(index, arg)
        if source is not None:
            sources.append(source)
            continue
        part = _place(arg)
        if part is None and index in written:
            raise StridedWriteError(index)
        if part is None or arg.requires_grad:
            sources.append(Whole(index, copied=True))
            continue
        nest, start, length = part
        parts[index] = Part(len(sources), 0, length, _held(arg), nest, tuple(arg.shape))
        sources.append(ByteRange(index, _first_byte(arg) - start, length))
    for members in sorted(set(shared.values())):
        _add_common_range(args, members, sources, parts)
    return Layout(tuple(sources), tuple(parts))


def storage_of(tensor: Tensor) -> int:
    """What identifies a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _shared_with_written(
    args: Sequence[Any], written: Sequence[int], considered: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """For each argument that shares storage with one that is written to: all that do, itself included."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index in considered:
        if isinstance(args[index], Tensor) and args[index].numel():
            groups[storage_of(args[index])].append(index)
    relevant = [tuple(group) for group in groups.values() if len(group) > 1 and not set(written).isdisjoint(group)]
    return {index: group for group in relevant for index in group}


def _alone(index: int, arg: Any) -> Whole | None:
    """An argument that can be handed over by itself without a copy."""
    if not isinstance(arg, Tensor) or arg.is_contiguous():
        return Whole(index)
    strides, shape = arg.stride(), arg.shape
    order = tuple(sorted(range(arg.dim()), key=lambda dim: (strides[dim], shape[dim]), reverse=True))
    return Whole(index, permutation=order) if arg.permute(order).is_contiguous() else None


def _add_common_range(
    args: Sequence[Any], members: tuple[int, ...], sources: list[Source], parts: list[Part | None]
) -> None:
    places = []
    for index in members:
        place = _place(args[index])
        if place is None or args[index].requires_grad:
            raise StridedWriteError(index)
        places.append(place)
    first = min(start for _, start, _ in places)
    if any(args[index].element_size() > 1 for index in members):
        first -= first % _ALIGNMENT
    end = max(start + length for _, start, length in places)
    for index, (nest, start, length) in zip(members, places, strict=True):
        arg = args[index]
        parts[index] = Part(len(sources), start - first, length, _held(arg), nest, tuple(arg.shape))
    sources.append(ByteRange(members[0], _first_byte(args[members[0]]) - first, end - first))


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _held(tensor: Tensor) -> torch.dtype:
    return CARRIER if carried(tensor) is not None else tensor.dtype


def _place(tensor: Tensor) -> tuple[Nest, int, int] | None:
    """A tensor's rows, with the first byte and the length in bytes of the range that they fill."""
    shape, strides, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    real = [dim for dim in range(tensor.dim()) if shape[dim] > 1 and strides[dim] > 0]
    real.sort(key=lambda dim: strides[dim], reverse=True)
    row = strides[real[0]] * shape[real[0]] if real else 1
    outer = strides[real[0]] if real else 1
    capacity = tensor.untyped_storage().nbytes() // tensor.element_size()
    for inside in dict.fromkeys((0, offset % outer)):
        start = offset - inside
        nest = _nest(shape, strides, real, inside)
        if nest is not None and start + row <= capacity:
            return nest, start * tensor.element_size(), row * tensor.element_size()
    return None


def _nest(shape: Sequence[int], strides: Sequence[int], real: list[int], inside: int) -> Nest | None:
    """The rows of a tensor whose first element lies `inside` elements after the start of its outermost row."""
    steps = [strides[dim] for dim in real]
    if any(outer % inner for outer, inner in pairwise(steps)):
        return None
    rows = [shape[real[0]]] if real else []
    rows += [outer // inner for outer, inner in pairwise(steps)]
    starts, rest = [0] if real else [], inside
    for step in steps[1:]:
        starts.append(rest // step)
        rest %= step
    sizes = [shape[dim] for dim in real]
    if any(start + size > row for start, size, row in zip(starts, sizes, rows, strict=True)):
        return None
    order = tuple(real.index(dim) if dim in real else -1 for dim in range(len(shape)))
    return Nest((*rows, steps[-1] if steps else 1), tuple(starts), tuple(sizes), rest, order)

"""Which bytes of memory a tensor view covers, exactly: the ground on which each byte is changed once.

Host memory is one space with absolute addresses, because separate storages may lie over the same bytes
(slices of one mapped file). Elsewhere every storage is a space of its own, addressed from its start.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Disjoint, sorted byte runs in one memory space."""

    space: Hashable
    anchor: torch.Tensor
    """A tensor of that space, through which it is reached."""
    starts: I64
    stops: I64

    @property
    def nbytes(self) -> int:
        """Bytes covered."""
        return int((self.stops - self.starts).sum())

    @property
    def identity(self) -> Hashable:
        """Equal for views that cover the same bytes."""
        return self.space, self.starts.tobytes(), self.stops.tobytes()


def spans_of(tensor: torch.Tensor) -> Spans:
    """The bytes that a view covers; axes of stride 0 (expanded) and overlapping windows count once.

    A contiguous or transposed tensor is a single run; otherwise there is a run for every row or element.
    """
    space, base = _place(tensor)
    if tensor.numel() == 0:
        return Spans(space, tensor, np.empty(0, np.int64), np.empty(0, np.int64))
    length = tensor.element_size()
    outer: list[tuple[int, int]] = []
    for step, size in sorted(zip([step * length for step in tensor.stride()], tensor.shape, strict=True)):
        if step == 0 or size == 1:
            continue
        if not outer and step <= length:
            length += (size - 1) * step
        else:
            outer.append((step, size))
    starts: I64 = np.array([base], dtype=np.int64)
    for step, size in outer:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    return Spans(space, tensor, *_merge(starts, starts + length))


def union(parts: Iterable[Spans]) -> list[Spans]:
    """All bytes of the parts, each once; one result for every memory space."""
    by_space: dict[Hashable, list[Spans]] = {}
    for part in parts:
        by_space.setdefault(part.space, []).append(part)
    merged = []
    for space, members in by_space.items():
        starts = np.concatenate([member.starts for member in members])
        stops = np.concatenate([member.stops for member in members])
        merged.append(Spans(space, members[0].anchor, *_merge(starts, stops)))
    return merged


def sharing(parts: Sequence[Spans]) -> list[list[int]]:
    """Sets of indices into `parts` that are tied together by shared bytes; sets of one are left out."""
    by_space: dict[Hashable, list[int]] = {}
    for index, part in enumerate(parts):
        by_space.setdefault(part.space, []).append(index)
    groups = []
    for members in by_space.values():
        starts = np.concatenate([parts[index].starts for index in members])
        stops = np.concatenate([parts[index].stops for index in members])
        owners = np.concatenate([np.full(len(parts[index].starts), index) for index in members])
        order = np.argsort(starts, kind="stable")
        reach = np.maximum.accumulate(stops[order])
        apart = np.concatenate([[True], starts[order][1:] >= reach[:-1]]) if len(order) else np.empty(0, bool)
        pairs = np.unique(np.stack([np.cumsum(apart), owners[order]]), axis=1)
        cuts = np.flatnonzero(np.diff(pairs[0])) + 1
        groups += [owned.tolist() for owned in np.split(pairs[1], cuts) if len(owned) > 1]
    return groups


def _place(tensor: torch.Tensor) -> tuple[Hashable, int]:
    if tensor.device.type == "cpu":
        return "cpu", tensor.data_ptr()
    storage = tensor.untyped_storage()
    return (str(tensor.device), storage._cdata), int(tensor.storage_offset()) * tensor.element_size()


def _merge(starts: I64, stops: I64) -> tuple[I64, I64]:
    if len(starts) <= 1:
        return starts, stops
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]

"""Where the bytes of a part of a tensor lie in its file, and how they are cut into pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepinfer_prep.runtime.loading.slices import Bounds

PAGE_BYTES = 4096
"""What the page cache and storage read at least."""

_WORTHWHILE_GAP_BYTES = 16 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """`count` runs of `run` bytes in a file, the first at `start`, one every `stride` bytes."""

    start: int
    run: int
    count: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Bytes wanted."""
        return self.run * self.count

    @property
    def span(self) -> int:
        """Bytes from the first wanted byte to the last one."""
        return (self.count - 1) * self.stride + self.run

    @property
    def is_read_whole(self) -> bool:
        """Whether what lies between the runs is read as well: for pieces of rows below a page.

        Skipping it would save storage nothing, and reading such pieces one by one takes longer.
        """
        return self.run < PAGE_BYTES and self.stride - self.run < _WORTHWHILE_GAP_BYTES

    def split(self, count: int) -> tuple[ByteRuns, ByteRuns]:
        """The first `count` runs and the rest."""
        rest = self.start + count * self.stride
        return replace(self, count=count), replace(self, start=rest, count=self.count - count)

    @property
    def bytes_to_read(self) -> int:
        """Bytes that are read to get the wanted ones."""
        return self.span if self.is_read_whole else self.nbytes


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A row-major tensor in a file."""

    start: int
    shape: tuple[int, ...]
    item_bytes: int

    def runs(self, bounds: Bounds) -> ByteRuns | None:
        """The bytes of a part; None where they are runs within runs and have to be split first."""
        start, stride, run = self.start, self.item_bytes, self.item_bytes
        count, distance = 1, 0
        for (first, last), size in zip(reversed(bounds), reversed(self.shape), strict=True):
            start += first * stride
            length = last - first
            if count == 1 and run == stride:
                run *= length
            elif count == 1:
                count, distance = length, stride
            elif count * distance == stride:
                count *= length
            elif length > 1:
                return None
            stride *= size
        return ByteRuns(start, run, count, distance or run)

    def pieces(self, bounds: Bounds, limit: int) -> Iterator[tuple[ByteRuns, Bounds]]:
        """Cut a part into pieces for which at most `limit` bytes (or one element) are read, in the file's order."""
        runs = self.runs(bounds)
        if runs is not None and runs.bytes_to_read <= max(limit, self.item_bytes):
            yield runs, bounds
            return
        axis = next(axis for axis, (first, last) in enumerate(bounds) if last - first > 1)
        first, last = bounds[axis]
        step = 1 if runs is None else max(1, limit * (last - first) // runs.bytes_to_read)
        for start in range(first, last, step):
            narrowed = (*bounds[:axis], (start, min(start + step, last)), *bounds[axis + 1 :])
            yield from self.pieces(narrowed, limit)

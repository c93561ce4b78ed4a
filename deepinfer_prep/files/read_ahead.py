"""Fetches many small ranges before they are used, where every request takes long."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.files.container import Location
from deepinfer_prep.files.storage import GAP_BYTES, FileState, Readable, Reader, Readers, open_reader

Item = TypeVar("Item")

_AT_ONCE = 12
_MOST_RANGES = 1024
_LARGEST_BYTES = 4 * 1024 * 1024
"""Larger ranges are read when they are used: they take longer than a request does."""
_WINDOW_BYTES = 8 * 1024 * 1024


class Extent(NamedTuple):
    """Bytes start..end of a file."""

    place: Path | Readable
    start: int
    end: int


def extent_of(location: Location) -> Extent:
    """Where a tensor lies."""
    start = location.data_start + location.tensor.start
    return Extent(location.path, start, start + location.tensor.nbytes)


def near(items: Iterable[Item], extent: Callable[[Item], tuple[Hashable, int, int]]) -> Iterator[list[Item]]:
    """Runs of items that one request fetches: of one file, in its order, with less than `GAP_BYTES` between two."""
    run: list[Item] = []
    last_file, last_end = None, 0
    for item in items:
        file, start, end = extent(item)
        if run and not (file == last_file and 0 <= start - last_end < GAP_BYTES):
            yield run
            run = []
        run.append(item)
        last_file, last_end = file, end
    if run:
        yield run


class _Window:
    """Some ranges that are being fetched."""

    def __init__(self, extents: Iterable[Extent], threads: ThreadPoolExecutor) -> None:
        by_place: dict[Path | Readable, list[Extent]] = {}
        for extent in dict.fromkeys(extents):
            by_place.setdefault(extent.place, []).append(extent)
        self._found: dict[Path | Readable, list[tuple[Extent, Future[list[fp8.U8]], int]]] = {}
        for place, some in by_place.items():
            found = self._found.setdefault(place, [])
            for run in near(sorted(some, key=lambda extent: extent[1:]), lambda extent: extent):
                future = threads.submit(_fetch, run)
                found += [(extent, future, number) for number, extent in enumerate(run)]

    def find(self, place: Path | Readable, start: int, end: int) -> fp8.U8 | None:
        """Bytes that are being fetched, once they are there."""
        found = self._found.get(place, [])
        position = bisect_right(found, start, key=lambda item: item[0].start) - 1
        if position < 0 or found[position][0].end < end:
            return None
        extent, future, number = found[position]
        return future.result()[number][start - extent.start : end - extent.start]


def _fetch(run: list[Extent]) -> list[fp8.U8]:
    with closing(open_reader(run[0].place)) as reader:
        reader.expect(run[0].start, run[-1].end)
        contents = []
        for extent in run:
            contents.append(np.empty(extent.end - extent.start, dtype=np.uint8))
            reader.read_into(contents[-1].data, extent.start)
        return contents


class AheadReaders(Readers):
    """Readers for which it is known what is read of them next; what is not local is fetched ahead, much at a time.

    At most 24 MiB wait to be used. Other reads work as well, one at a time.

    Args:
        extents: what will be read, in this order.
    """

    def __init__(self, extents: Iterable[Extent]) -> None:
        super().__init__()
        self._waiting: Iterator[Extent] = (
            extent
            for extent in extents
            if not isinstance(extent.place, Path) and 0 < extent.end - extent.start <= _LARGEST_BYTES
        )
        self._windows: deque[_Window] = deque()
        self._threads: ThreadPoolExecutor | None = None

    def get(self, place: Path | Readable) -> Reader:
        """A reader of a file; errors as `Readers.get`."""
        return super().get(place) if isinstance(place, Path) else _AheadReader(place, self)

    def get_directly(self, place: Path | Readable) -> Reader:
        """A reader that fetches when it is asked."""
        return super().get(place)

    def find(self, place: Path | Readable, start: int, end: int) -> fp8.U8 | None:
        """Bytes that were fetched ahead, None where they were not."""
        self._fill()
        for number, window in enumerate(self._windows):
            found = window.find(place, start, end)
            if found is not None:
                if number:
                    self._windows.popleft()
                return found
        return None

    def close(self) -> None:
        """Close the file that is open, and give up what was not used."""
        super().close()
        self._windows.clear()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
            self._waiting = iter(())

    def _fill(self) -> None:
        while len(self._windows) < 2:
            extents = list(_until_full(self._waiting))
            if not extents:
                return
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_AT_ONCE)
            self._windows.append(_Window(extents, self._threads))


def _until_full(extents: Iterator[Extent]) -> Iterator[Extent]:
    total = 0
    for extent in islice(extents, _MOST_RANGES):
        yield extent
        total += extent.end - extent.start
        if total >= _WINDOW_BYTES:
            return


class _AheadReader:
    def __init__(self, place: Readable, readers: AheadReaders) -> None:
        self.place: Path | Readable = place
        self._readers = readers

    def size(self) -> int:
        return self._readers.get_directly(self.place).size()

    def state(self) -> FileState:
        return self._readers.get_directly(self.place).state()

    def expect(self, start: int, end: int) -> None:
        """Nothing: it is known already."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        found = self._readers.find(self.place, offset, offset + len(buffer))
        if found is None:
            self._readers.get_directly(self.place).read_into(buffer, offset)
        else:
            buffer[:] = found.data

    def close(self) -> None:
        """Nothing: the readers are closed together."""

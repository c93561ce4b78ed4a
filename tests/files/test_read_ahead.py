"""Small ranges of places that answer slowly are fetched before they are used, many with one request."""

from __future__ import annotations

import io
import random
import threading
from contextlib import closing
from pathlib import Path

import pytest

from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.read_ahead import AheadReaders, Extent, near
from deepinfer_prep.files.storage import GAP_BYTES, FileState, Reader, StoredPlace
from deepinfer_prep.remote.reading import BrokenStreamError, RemoteReader
from deepinfer_prep.remote.tree import RemotePath

DATA = random.Random(0).randbytes(5 * 1024 * 1024)


class Store:
    """Holds `DATA` under every name, and writes down what is asked for."""

    is_pinned = True

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.breaks_at: int | None = None
        self._lock = threading.Lock()

    def url(self, name: str) -> str:
        return f"test://{name}"

    def list(self) -> dict[str, FileState]:
        return {name: FileState(len(DATA), 0, "1") for name in ("one", "two")}

    def state(self, name: str) -> FileState:
        return self.list()[name]

    def open_range(self, name: str, state: FileState, start: int, end: int) -> Stream:
        with self._lock:
            self.asked.append((start, end))
            breaks_at, self.breaks_at = self.breaks_at, None
        return Stream(start, end if breaks_at is None else breaks_at)


class Stream:
    def __init__(self, start: int, end: int) -> None:
        self._body = io.BytesIO(DATA[start:end])

    def read_into(self, buffer: memoryview) -> int:
        return self._body.readinto(buffer[:100_000])

    def close(self) -> None:
        self._body.close()


@pytest.fixture
def store() -> Store:
    return Store()


def reader_of(store: Store) -> RemoteReader:
    return RemoteReader(RemotePath(store, "one"), store, "one", store.state("one"))


def read(reader: Reader, start: int, end: int) -> bytes:
    buffer = bytearray(end - start)
    reader.read_into(memoryview(buffer), start)
    return bytes(buffer)


def test_neighbours_are_in_one_file_in_order_and_not_far_apart() -> None:
    far = 100 + GAP_BYTES
    items = [("a", 0, 10), ("a", 10, 20), ("a", 19, 30), ("a", 99, 100), ("a", far - 1, far), ("a", 2 * far, 3 * far)]
    items.append(("b", 3 * far, 3 * far + 1))
    assert [len(run) for run in near(items, lambda item: item)] == [2, 3, 1, 1]


def test_what_lies_between_expected_ranges_is_read_over(store: Store) -> None:
    reader = reader_of(store)
    reader.expect(10, 3_000_000)
    ranges = [(10, 20), (500_000, 500_100), (500_100, 900_000), (1_900_000, 3_000_000)]
    for start, end in ranges:
        reader.expect(start, end)
        assert read(reader, start, end) == DATA[start:end]
    assert store.asked == [(10, 3_000_000)]


def test_a_gap_that_is_wide_or_behind_is_not_read_over(store: Store) -> None:
    reader = reader_of(store)
    reader.expect(0, 4_000_000)
    for start, end in ((0, 10), (10 + GAP_BYTES, 2_000_000), (5, 6)):
        assert read(reader, start, end) == DATA[start:end]
    assert [start for start, _ in store.asked] == [0, 10 + GAP_BYTES, 5]


def test_an_answer_that_breaks_off_in_a_gap_is_asked_for_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_prep.remote.reading.FIRST_PAUSE_SECONDS", 0.001)
    reader, store.breaks_at = reader_of(store), 250_000
    reader.expect(0, 1_000_000)
    assert read(reader, 0, 10) == DATA[:10]
    assert read(reader, 500_000, 1_000_000) == DATA[500_000:1_000_000]
    assert store.asked == [(0, 1_000_000), (500_000, 1_000_000)]


def test_ranges_that_lie_close_together_take_one_request_in_any_order(store: Store) -> None:
    ranges = [(place * 20_000, place * 20_000 + 5_000) for place in range(200)]
    random.Random(1).shuffle(ranges)
    place = RemotePath(store, "one")
    with closing(AheadReaders(Extent(place, *one) for one in ranges)) as readers:
        for start, end in ranges:
            assert read(readers.get(place), start + 10, end) == DATA[start + 10 : end]
    assert store.asked == [(0, 199 * 20_000 + 5_000)]


def test_more_than_a_window_is_fetched_piece_by_piece(store: Store) -> None:
    places = [RemotePath(store, name) for name in ("one", "two")]
    extents = [Extent(place, start, start + 1_500_000) for place in places * 4 for start in (0, 1_600_000, 3_200_000)]
    with closing(AheadReaders(extents)) as readers:
        for place, start, end in extents:
            assert isinstance(place, StoredPlace)
            assert read(readers.get(place), start, end) == DATA[start:end]


def test_what_was_not_announced_is_read_all_the_same(store: Store) -> None:
    place = RemotePath(store, "one")
    with closing(AheadReaders([Extent(place, 0, 100)])) as readers:
        assert read(readers.get(place), 50, 150) == DATA[50:150]
        assert read(readers.get(place), 0, 100) == DATA[:100]


def test_local_files_are_opened_as_ever(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with closing(AheadReaders([Extent(path, 0, 100)])) as readers:
        assert read(readers.get(path), 0, 100) == DATA[:100]


def test_a_fetch_that_fails_is_an_error_where_the_bytes_are_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_prep.remote.reading.FIRST_PAUSE_SECONDS", 0.001)

    def broken(*asked: object) -> Stream:
        raise BrokenStreamError("nobody there")

    monkeypatch.setattr(store, "open_range", broken)
    place = RemotePath(store, "one")
    with closing(AheadReaders([Extent(place, 0, 100)])) as readers, pytest.raises(PrepError, match="nobody there"):
        read(readers.get(place), 0, 100)

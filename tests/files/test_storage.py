"""Small reads that mostly go to one file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from deepinfer_prep.files.storage import Readers
from tests.raises import raises_code


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "one", tmp_path / "two"]
    for path in found:
        path.write_bytes(path.name.encode())
    return found


def test_readers_keep_one_file_open(paths: list[Path]) -> None:
    with closing(Readers()) as readers:
        first = readers.get(paths[0])
        assert readers.get(paths[0]) is first
        second = readers.get(paths[1])
        buffer = bytearray(3)
        second.read_into(memoryview(buffer), 0)
        assert buffer == b"two"
        with pytest.raises(OSError, match="Bad file descriptor"):
            first.status()
    with pytest.raises(OSError, match="Bad file descriptor"):
        second.status()


def test_readers_work_again_after_a_file_that_cannot_be_opened(paths: list[Path]) -> None:
    with closing(Readers()) as readers:
        readers.get(paths[0])
        with raises_code("not-a-file"):
            readers.get(paths[0].parent)
        assert readers.get(paths[0]).size() == 3

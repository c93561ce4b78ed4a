"""Small reads that mostly go to one file, and what makes a file the same on two machines."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_prep.files.storage import FileState, Readers, check_same_here
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


def test_a_file_with_another_inode_is_the_same_on_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"1234")
    here = FileState.of(path)
    elsewhere = replace(here, inode=here.inode + 1, changed_ns=0)
    assert check_same_here(path, elsewhere) == here


@pytest.mark.parametrize("field", ["size", "modified_ns"])
def test_a_file_of_another_size_or_time_is_another_file(tmp_path: Path, field: str) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"1234")
    here = FileState.of(path)
    with raises_code("file-differs"):
        check_same_here(path, replace(here, **{field: getattr(here, field) + 1}))

"""How reading is cut into steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_prep.files.storage import RangeReader
from deepinfer_prep.runtime.loading.open_files import OpenFiles
from deepinfer_prep.runtime.loading.tensor_file import TensorFile
from deepinfer_prep.runtime.loading.transfers import Populate, populate_transfers

MIB = 1024 * 1024


@pytest.fixture
def file(tmp_path: Path) -> TensorFile:
    (tmp_path / "file").write_bytes(b"")
    return TensorFile(tmp_path / "file", 0, OpenFiles())


@pytest.mark.parametrize(("size", "steps"), [(0, 0), (1, 1), (40 * MIB, 5), (64 * MIB, 8), (8192 * MIB, 128)])
def test_little_is_shared_between_threads_and_much_takes_few_steps(file: TensorFile, size: int, steps: int) -> None:
    assert len(list(populate_transfers(file, [(100, 100 + size)]))) == steps


def test_the_steps_tile_the_extents_and_neighbours_go_together(file: TensorFile) -> None:
    extents = [(0, 5 * MIB), (5 * MIB, 30 * MIB), (31 * MIB, 32 * MIB), (31 * MIB, 33 * MIB)]
    found = [step for step in populate_transfers(file, extents) if isinstance(step, Populate)]
    assert [(step.start // MIB, step.end // MIB) for step in found] == [(0, 8), (8, 16), (16, 24), (24, 30), (31, 33)]


@pytest.mark.parametrize(("missing", "asked"), [((), []), ((0,), [(10, 90)]), ((55,), [(10, 90)]), ((99,), [(10, 90)])])
def test_storage_is_asked_for_all_of_a_step_where_a_part_is_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[int, ...], asked: list[tuple[int, int]]
) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        RangeReader, "is_in_memory", lambda self, offset: not any(abs(offset - one) <= 10 for one in missing)
    )
    monkeypatch.setattr(RangeReader, "will_need", lambda self, offset, size: found.append((offset, size)))
    file = TensorFile(tmp_path / "file", 100, OpenFiles())
    assert file.populate(10, 100) > 0
    assert found == asked
    file.close()


def test_what_was_just_written_is_in_memory_and_an_error_is_no_reason_to_ask(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123")
    with RangeReader(tmp_path / "file") as reader:
        assert reader.is_in_memory(1)
        assert reader.is_in_memory(-1)

"""How reading is cut into steps."""

from __future__ import annotations

from pathlib import Path

import pytest

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

"""Fixtures of the hostile tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepinfer_prep.files.digests
import deepinfer_prep.workers
import deepinfer_prep.writing.preflight
import deepinfer_prep.writing.segment_writer
from deepinfer_prep.files import segments
from tests.hostile.checkpoints import convert, write_checkpoint
from tests.small_files import tree

SMALL = 4096


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small checkpoint have many segments, each committed on its own."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", SMALL)
    monkeypatch.setattr(deepinfer_prep.writing.segment_writer, "COMMIT_BYTES", 1)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: some tests sync files thousands of times."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hostile-") as folder:
        yield Path(folder)


@pytest.fixture
def source(scratch: Path) -> Path:
    return write_checkpoint(scratch / "source")


@pytest.fixture
def expected(small_segments: None, source: Path, scratch: Path) -> dict[str, bytes]:
    """What an undisturbed run with small segments writes."""
    assert convert(source, scratch / "expected").exit_code == 0
    return tree(scratch / "expected")

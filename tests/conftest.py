"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_checkpoint import TINY, write_checkpoint


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V4.1 checkpoint with every kind of tensor; tests must not write to it."""
    folder = tmp_path_factory.mktemp("sample") / "checkpoint"
    write_checkpoint(folder, TINY)
    return folder

"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from make_checkpoint import TINY, write_checkpoint

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V4.1 checkpoint with every kind of tensor; tests must not write to it."""
    folder = tmp_path_factory.mktemp("sample") / "checkpoint"
    write_checkpoint(folder, TINY)
    return folder

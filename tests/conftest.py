"""Fixtures that several test files share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from make_checkpoint import TINY, write_checkpoint

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

_ABSENT = [name for name in ("moto", "boto3", "awscrt") if find_spec(name) is None]
collect_ignore = ["remote"] if _ABSENT else []


def pytest_report_header() -> list[str]:
    """Say what is left out and why."""
    return [f"tests/remote is left out: it needs {', '.join(_ABSENT)}"] if _ABSENT else []


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V4.1 checkpoint with every kind of tensor; tests must not write to it."""
    folder = tmp_path_factory.mktemp("sample") / "checkpoint"
    write_checkpoint(folder, TINY)
    return folder

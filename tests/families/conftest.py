"""Fixtures of the family tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.layouts import LAYOUTS
from tests.families.outcomes import REFUSED, Outcome, convert_layout


class Outcomes(dict[str, Outcome]):
    """Converts a checkpoint when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, name: str) -> Outcome:
        self[name] = convert_layout(name, self._factory.mktemp(name))
        return self[name]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcome of converting each family's checkpoint with the default options, by name."""
    return Outcomes(tmp_path_factory)


@pytest.fixture(params=LAYOUTS)
def outcome(request: pytest.FixtureRequest, outcomes: Outcomes) -> Outcome:
    """Every outcome in turn, refusals included."""
    return outcomes[request.param]


@pytest.fixture(params=[name for name in LAYOUTS if name not in REFUSED])
def converted(request: pytest.FixtureRequest, outcomes: Outcomes) -> Outcome:
    """Every outcome in turn that is a finished output."""
    assert not outcomes[request.param].refusal
    return outcomes[request.param]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"

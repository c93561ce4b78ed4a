"""One cluster for all tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.cluster import running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with running_cluster() as started:
        yield started


@pytest.fixture
def address(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the cluster, also where the command finds it by itself."""
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", cluster.address)
    return str(cluster.address)

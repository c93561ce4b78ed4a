"""A Ray cluster of two nodes with one processor each, on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray.cluster_utils import Cluster

    import deepinfer_prep.engines.ray_engine  # noqa: F401  # Sets what ray reads when it is imported.

    started = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **NODE})
    try:
        started.add_node(**NODE)
        yield started
    finally:
        started.shutdown()


NODE = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}


@pytest.fixture
def address(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the cluster, also where the command finds it by itself."""
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", cluster.address)
    return str(cluster.address)

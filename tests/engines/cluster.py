"""Ray clusters on this machine, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NODE = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}


@contextmanager
def running_cluster() -> Iterator[Any]:
    """Two nodes with one processor each, whose processes have the environment of this moment."""
    from ray.cluster_utils import Cluster

    import deepinfer_prep.engines.ray_engine  # noqa: F401  # Sets what ray reads when it is imported.

    started = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **NODE})
    try:
        started.add_node(**NODE)
        yield started
    finally:
        started.shutdown()

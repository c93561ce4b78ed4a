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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Unless stated it is 15, and whatever else the machine does would come first.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Its name.
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **NODE})
    try:
        started.add_node(**NODE)
        yield started
    finally:
        started.shutdown()

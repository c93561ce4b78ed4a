"""What carries out the pieces of work of a plan: threads of this process, or the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from deepinfer_prep.engines.engine import Engine
from deepinfer_prep.errors import PrepError

EngineName = Literal["threads", "ray"]


@contextmanager
def open_engine(
    name: EngineName, ray_address: str | None = None, workers: int | None = None
) -> Iterator[Engine | None]:
    """The engine that a user names; None stands for threads, whose number depends on what they work on.

    Args:
        ray_address: host:port of a Ray cluster's head node.
        workers: threads of each Ray task.

    Raises:
        PrepError: the extra that it needs is not installed, or there is no cluster.
    """
    if name == "threads":
        yield None
        return
    try:
        from deepinfer_prep.engines.ray_engine import connect
    except ModuleNotFoundError as error:
        raise PrepError(
            f"--engine ray needs the package {error.name}. Install it: pip install 'deepinfer-prep[ray]'",
            code="missing-extra",
        ) from None
    with connect(ray_address, workers) as engine:
        yield engine

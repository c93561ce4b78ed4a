"""Python's cyclic garbage collector, kept out of the way of loading."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold the collector back.

    Headers and plans are many small objects, all of them kept. Making them would set off full collections of
    everything that torch holds, which take longer than the work itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

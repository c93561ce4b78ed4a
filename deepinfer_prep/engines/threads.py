"""The engine that needs nothing: threads of this process."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

from deepinfer_prep.engines.engine import Item, Result, Work
from deepinfer_prep.workers import interleave, run_parallel


@dataclass(frozen=True, slots=True)
class Threads:
    """`workers` threads as `Engine`."""

    workers: int
    is_remote = False

    def run(
        self, work: Work[Item, Result], sources: Iterable[Iterable[Item]], count: int, chunk_size: int
    ) -> Generator[Result, None, None]:
        """As `Engine.run`.

        Threads work in sources of their own: a file system may let one thread at a time write to a file.
        """
        return run_parallel(interleave(sources, self.workers), work, self.workers, chunk_size)

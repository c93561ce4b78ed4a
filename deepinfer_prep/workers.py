"""Runs independent pieces of work on a few threads, each with one reusable buffer, and tells how far it is."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from deepinfer_prep import fp8
from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.segments import new_buffer
from deepinfer_prep.files.storage import StoredPlace

Item = TypeVar("Item")
Result = TypeVar("Result")

DEFAULT_CHUNK_BYTES = 8 * 1024 * 1024
_WORKERS_OF_STORES = 12
QUEUE_DEPTH = 8
"""Segments handed out ahead, so that threads stay busy while the caller commits results."""


def default_workers(*places: object) -> int:
    """Twice the processors that this process may use, up to 8: half of the threads wait for the disk.

    12 where one of `places` is in a store: nearly all of the threads wait for it.
    """
    if any(isinstance(place, StoredPlace) for place in places):
        return _WORKERS_OF_STORES
    return min(8, 2 * len(os.sched_getaffinity(0)))


def run_parallel(
    items: Iterable[Item], work: Callable[[Item, fp8.U8], Result], workers: int, chunk_size: int
) -> Generator[Result, None, None]:
    """Yield work(item, buffer) for every item, in the order of completion.

    At most `workers` buffers of `chunk_size` bytes exist. The first error stops the hand-out of items and is
    raised after the pieces that are under way have ended and their results were yielded.
    """
    local = threading.local()

    def with_buffer(item: Item) -> Result:
        if not hasattr(local, "buffer"):
            local.buffer = new_buffer(chunk_size)
        return work(item, local.buffer)

    source = iter(items)
    executor = ThreadPoolExecutor(workers)
    try:
        pending: set[Future[Result]] = set()
        while True:
            ahead = max(2 * workers, QUEUE_DEPTH) - len(pending)
            for item in islice(source, ahead):
                pending.add(_submit(executor, with_buffer, item))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            failed = [future for future in done if future.exception() is not None]
            if failed:
                executor.shutdown(wait=True, cancel_futures=True)
                done |= {future for future in pending if not future.cancelled()}
            # What has succeeded is not lost with what has failed.
            yield from (future.result() for future in done if future.exception() is None)
            for future in failed:
                future.result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _submit(executor: ThreadPoolExecutor, work: Callable[[Item], Result], item: Item) -> Future[Result]:
    try:
        return executor.submit(work, item)
    except RuntimeError as error:
        raise PrepError(
            f"the system starts no more threads ({error}). Use fewer --workers.", code="no-threads"
        ) from None


def batches(items: Iterable[Item], size: Callable[[Item], int], most_bytes: int, most: int) -> Iterator[list[Item]]:
    """Put neighbours together, as handing out an item costs more than working on a small one.

    A batch holds at most `most` items of `most_bytes` together, or one item that is larger.
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        nbytes = size(item)
        if batch and (total + nbytes > most_bytes or len(batch) == most):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield batch


def interleave(sources: Iterable[Iterable[Item]], width: int) -> Iterator[Item]:
    """Take from `width` sources in turn; when one is at its end the next takes its place."""
    waiting = map(iter, sources)
    current = deque(islice(waiting, width))
    while current:
        source = current.popleft()
        try:
            yield next(source)
        except StopIteration:
            current.extendleft(islice(waiting, 1))
        else:
            current.append(source)


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` bytes of a stage such as "convert"."""

    stage: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Adds up the bytes of one stage and reports each step."""

    def __init__(self, callback: ProgressCallback | None, stage: str, total: int) -> None:
        self._callback, self._stage, self._total, self._done = callback, stage, total, 0
        self.add(0)

    def add(self, count: int) -> None:
        """Report `count` more bytes."""
        self._done += count
        if self._callback is not None:
            self._callback(Progress(self._stage, self._done, self._total))

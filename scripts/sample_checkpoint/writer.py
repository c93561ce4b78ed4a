"""Fill the planned files: blocks of rows are made, quantized and written in place by a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .quantize import encode_bf16, quantize
from .shards import Shard
from .table import Entry, Plain
from .values import block_values, row_blocks

Write = Callable[[str, int, npt.NDArray[np.generic]], None]


def write_shards(folder: Path, shards: Sequence[Shard], entries: Sequence[Entry], seed: int, workers: int) -> None:
    """Write every shard. Memory is a few megabytes a worker, whatever the size of a tensor."""
    with ExitStack() as stack:
        places: dict[str, tuple[int, int]] = {}
        for shard in shards:
            file = stack.enter_context(open(folder / shard.filename, "wb"))
            file.truncate(shard.size)
            os.pwrite(file.fileno(), shard.header, 0)
            places |= {name: (file.fileno(), offset) for name, offset in shard.offsets.items()}

        def write(name: str, start: int, data: npt.NDArray[np.generic]) -> None:
            descriptor, offset = places[name]
            _write_all(descriptor, data, offset + start)

        def work(first: int) -> None:
            for entry, start, stop in islice(_jobs(entries), first, None, workers):
                _write_block(entry, seed, start, stop, write)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))


def _jobs(entries: Sequence[Entry]) -> Iterator[tuple[Entry, int, int]]:
    for entry in entries:
        for start, stop in row_blocks(entry):
            yield entry, start, stop


def _write_block(entry: Entry, seed: int, start: int, stop: int, write: Write) -> None:
    values = block_values(entry, seed, start, stop)
    if isinstance(entry, Plain):
        stored = values if entry.stored.dtype == "F32" else encode_bf16(values)
        write(entry.name, start * stored[:1].nbytes, stored)
        return
    codes, scale = quantize(values, entry.block_rows, entry.element)
    write(entry.weight.name, start * codes.shape[1], codes)
    write(entry.scale.name, start // entry.block_rows * scale.shape[1], scale)


def _write_all(descriptor: int, data: npt.NDArray[np.generic], offset: int) -> None:
    view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written

"""Reading and rewriting byte runs of tensor memory, a bounded piece at a time.

Host memory is worked on in place. Memory of any other device is staged through the host piece by piece, so
that one implementation of the arithmetic serves all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from deepinfer_prep import fp8
from deepinfer_prep.runtime.rescaling.byte_spans import I64, Spans

PIECE_BYTES = 16 * 1024 * 1024
_SHORT_RUN_BYTES = 4096
_GATHER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CodeChunk:
    """Some bytes to read or to change in place; changes count once `write_back` was called."""

    codes: fp8.U8
    write_back: Callable[[], None]


def pieces(spans: Spans) -> Iterator[CodeChunk]:
    """Every byte of `spans` once, in pieces of at most 16 MiB that hold whole elements.

    Long runs come one by one, short ones (narrow rows, strided elements) gathered together.
    """
    if len(spans.starts) == 0:
        return
    memory: _Memory = _HostMemory(spans) if spans.anchor.device.type == "cpu" else StagedMemory(spans.anchor)
    lengths = spans.stops - spans.starts
    for run in np.flatnonzero(lengths >= _SHORT_RUN_BYTES):
        start, stop = int(spans.starts[run]), int(spans.stops[run])
        for first in range(start, stop, PIECE_BYTES):
            yield memory.piece(first, min(first + PIECE_BYTES, stop))
    short = np.flatnonzero(lengths < _SHORT_RUN_BYTES)
    for batch in np.array_split(short, int(lengths[short].sum()) // _GATHER_BYTES + 1):
        if len(batch):
            yield memory.gathered(_positions(spans.starts[batch], lengths[batch]))


def _positions(starts: I64, lengths: I64) -> I64:
    ends = np.cumsum(lengths)
    positions: I64 = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
    return positions


class _Memory(Protocol):
    def piece(self, start: int, stop: int) -> CodeChunk: ...

    def gathered(self, positions: I64) -> CodeChunk: ...


class _HostMemory:
    def __init__(self, spans: Spans) -> None:
        self._base = int(spans.starts[0])
        size = int(spans.stops[-1]) - self._base
        # Holes between the runs are part of this array and are never touched.
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._base))

    def piece(self, start: int, stop: int) -> CodeChunk:
        return CodeChunk(self._bytes[start - self._base : stop - self._base], _nothing)

    def gathered(self, positions: I64) -> CodeChunk:
        memory, places = self._bytes, positions - self._base
        codes = memory[places]

        def write_back() -> None:
            memory[places] = codes

        return CodeChunk(codes, write_back)


class StagedMemory:
    """The storage of a tensor on any device, read and written through host copies."""

    def __init__(self, anchor: torch.Tensor) -> None:
        storage = anchor.untyped_storage()
        empty = torch.empty(0, dtype=torch.uint8, device=anchor.device)
        self._bytes = empty.set_(storage, 0, (storage.nbytes(),), (1,))

    def piece(self, start: int, stop: int) -> CodeChunk:
        """The bytes start..stop of the storage."""
        return self._staged(self._bytes[start:stop], lambda host: self._bytes[start:stop].copy_(host))

    def gathered(self, positions: I64) -> CodeChunk:
        """The bytes at `positions` of the storage."""
        places = torch.from_numpy(positions).to(self._bytes.device)
        return self._staged(self._bytes[places], lambda host: self._bytes.index_put_((places,), host))

    def _staged(self, source: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> CodeChunk:
        host = source.to("cpu", copy=True)

        def write_back() -> None:
            store(host.to(self._bytes.device))

        return CodeChunk(host.numpy(), write_back)


def _nothing() -> None:
    pass

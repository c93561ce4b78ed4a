"""The fixed segments of a file: the unit of work, of digests and of resuming."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.files.storage import DIRECT_BYTES

SEGMENT_BYTES = 64 * 1024 * 1024
"""Unit of work, of digests and of resuming: a segment is this many bytes of one output file."""

SLACK_BYTES = 8
"""A range is widened to whole elements, which are at most 8 bytes long."""


def segments(size: int) -> Iterator[tuple[int, int]]:
    """The (start, end) byte ranges of a file's segments; an empty file has one empty segment."""
    for start in range(0, max(size, 1), SEGMENT_BYTES):
        yield start, min(start + SEGMENT_BYTES, size)


def new_buffer(chunk_size: int) -> fp8.U8:
    """A buffer for chunks of at most `chunk_size` bytes.

    Chunks start at its byte `DIRECT_BYTES`, which is aligned in memory as direct writes demand; what lies
    around a chunk is room for widening.
    """
    size = DIRECT_BYTES + max(chunk_size, 8) + SLACK_BYTES
    memory = np.empty(size + DIRECT_BYTES, dtype=np.uint8)
    aligned = -memory.ctypes.data % DIRECT_BYTES
    return memory[aligned : aligned + size]

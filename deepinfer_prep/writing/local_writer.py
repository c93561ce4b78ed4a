"""Writes blocks into the workspace of a local output, from the process that holds it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from deepinfer_prep import fp8
from deepinfer_prep.files.digests import digest_range
from deepinfer_prep.files.storage import DirectWriter
from deepinfer_prep.writing.journal import SegmentDone
from deepinfer_prep.writing.target import Block, Chunks
from deepinfer_prep.writing.workspace import Workspace


class LocalWriter:
    """A workspace as `BlockWriter`; the files that are open are shared by all threads until they were synced."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._open: dict[str, DirectWriter] = {}
        self._lock = threading.Lock()

    def check(self) -> None:
        """Nothing: this process holds the workspace."""

    def buffer_bytes(self, chunk_size: int, sizes: Iterable[int]) -> int:
        """What is read at once is written at once."""
        return chunk_size

    def is_intact(self, block: Block, earlier: Sequence[SegmentDone], buffer: fp8.U8) -> bool:
        """Whether the bytes on disk have the digest that the journal states."""
        (done,) = earlier
        try:
            return digest_range(self._get(block), block.start, block.end, buffer) == done.digest
        except OSError:
            return False  # What cannot be read any more is written again.

    def put(self, block: Block, chunks: Chunks) -> str:
        """Write a block into its file."""
        writer = self._get(block)
        writer.reserve(block.start, block.end)
        for offset, chunk in chunks:
            writer.write_from(chunk.data, offset)
        return ""

    def _get(self, block: Block) -> DirectWriter:
        """The writer of a block's file, opened and given its final size at first use."""
        with self._lock:
            writer = self._open.get(block.name)
            if writer is None:
                writer = self._workspace.direct_writer(block.name)
                try:
                    writer.resize(block.size)
                except BaseException:
                    writer.close()
                    raise
                self._open[block.name] = writer
            return writer

    def sync(self, name: str) -> None:
        """Sync one file."""
        with self._lock:
            writer = self._open[name]
        writer.sync()

    def close_file(self, name: str) -> None:
        """Close one file."""
        with self._lock:
            self._open.pop(name).close()

    def abandon(self) -> None:
        """Close what an error left open."""
        for name in list(self._open):
            with suppress(OSError):  # None of it counts as written.
                self.close_file(name)

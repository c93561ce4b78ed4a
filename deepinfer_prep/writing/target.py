"""Where a conversion's output goes, behind one interface: a local folder, or a prefix of an object store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepinfer_prep import fp8
from deepinfer_prep.files import segments
from deepinfer_prep.files.storage import Place, Readable
from deepinfer_prep.manifest import FileRecord, Manifest
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.workers import ProgressCallback
from deepinfer_prep.writing.journal import SegmentDone

Chunks = Iterator[tuple[int, fp8.U8]]
"""Bytes of a file by their offset in it, in order; each array is valid until the next one is asked for."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes start..end of an output file of `size` bytes that are written at once: one segment or a few."""

    name: str
    size: int
    first: int
    """Number of its first segment."""
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.end - self.start

    @property
    def segments(self) -> range:
        """Numbers of its segments; an empty file has one."""
        return range(self.first, self.first + max(1, -(-self.nbytes // segments.SEGMENT_BYTES)))


def blocks(name: str, size: int, block_bytes: int) -> Iterator[Block]:
    """The blocks of a file; `block_bytes` is a multiple of `SEGMENT_BYTES`."""
    for start in range(0, max(size, 1), block_bytes):
        yield Block(name, size, start // segments.SEGMENT_BYTES, start, min(start + block_bytes, size))


class BlockWriter(Protocol):
    """Writes blocks of a run, and finds those that an earlier run wrote; called from several threads."""

    def check(self) -> None:
        """Make sure that this process reaches the run that the writer belongs to.

        Raises:
            PrepError, OSError: it does not.
        """

    def buffer_bytes(self, chunk_size: int, sizes: Iterable[int]) -> int:
        """Memory that a thread needs to write files of these sizes, where it reads `chunk_size` bytes at once."""

    def is_intact(self, block: Block, earlier: Sequence[SegmentDone], buffer: fp8.U8) -> bool:
        """Whether a block that an earlier run recorded still holds those bytes."""

    def put(self, block: Block, chunks: Chunks) -> str:
        """Write a block.

        Returns:
            What the place calls these bytes, an ETag; empty in a folder.

        Raises:
            PrepError, OSError: it was not written.
        """

    def sync(self, name: str) -> None:
        """Make durable what was written to a file.

        Raises:
            PrepError, OSError: none of it counts as written.
        """

    def close_file(self, name: str) -> None:
        """All of a file is written and synced."""

    def abandon(self) -> None:
        """Close what an error left open."""


class Run(Protocol):
    """The unfinished output of one conversion. What its writer synced counts once `record` has returned."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user has to hear about the place that is written to."""

    @property
    def writer(self) -> BlockWriter:
        """Writes from threads of this process."""

    def share(self) -> BlockWriter:
        """A writer that can be sent to other processes by pickle; after `read_done`."""

    def resume_publication(self, workers: int, chunk_size: int, progress: ProgressCallback | None) -> Manifest | None:
        """The manifest of an earlier run of the same conversion whose publication was interrupted, else None."""

    def read_done(self) -> dict[tuple[str, int], SegmentDone]:
        """What an earlier run has recorded, by file name and segment number."""

    def block_bytes(self, size: int) -> int:
        """How many bytes of a file of `size` bytes are written at once: a multiple of `SEGMENT_BYTES`."""

    def record(self, done: Sequence[SegmentDone]) -> None:
        """Record durable segments as done.

        Raises:
            PrepError, OSError: they do not count as done.
        """

    def put_file(self, name: str, size: int, chunks: Iterable[fp8.U8]) -> FileRecord:
        """Write a whole file in order, durably."""

    def written(self, file: OutputFile) -> Path | Readable:
        """Where the bytes of a committed file can be read before they are published."""

    def publish(self, manifest: Manifest) -> None:
        """Give every file its final name, the manifest last, and end the run.

        Raises:
            PrepError, OSError: a step failed; the same command goes on from there.
        """


class Target(Protocol):
    """An output: checked before anything is written, then held by one run."""

    @property
    def place(self) -> Place:
        """Where the output is."""

    def check_separate(self, source: Place) -> None:
        """Refuse a source that is the output, lies inside it or holds it."""

    def check_sources(self, sources: Iterable[Place]) -> None:
        """Refuse source files that publication would replace."""

    def check_usable(self, identity: Mapping[str, Any], names: Sequence[str], overwrite: bool) -> None:
        """Refuse an output that holds anything but an unfinished run of the same conversion; `names` are its files."""

    def check_space(self, needed: int) -> None:
        """Refuse when there is less room than the output still needs."""

    def hold(
        self, identity: Mapping[str, Any], files: Sequence[OutputFile], overwrite: bool
    ) -> AbstractContextManager[Run]:
        """Begin a run, or go on with an earlier one of the same identity; checks again that the output is usable."""

    def discard(self) -> bool:
        """End an unfinished run and remove all that it wrote; False where there is none."""

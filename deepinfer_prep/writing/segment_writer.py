"""Writes the mapped files of a plan into a run's output, block by block, and records what is durable."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from deepinfer_prep import fp8
from deepinfer_prep.engines.engine import Engine
from deepinfer_prep.errors import ConversionError, PrepError
from deepinfer_prep.files.digests import SegmentDigests
from deepinfer_prep.files.storage import FileState, check_same_here, open_reader
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.workers import Meter
from deepinfer_prep.writing.journal import SegmentDone
from deepinfer_prep.writing.output_bytes import Tally, output_chunks
from deepinfer_prep.writing.target import Block, BlockWriter, Chunks, Run, blocks

COMMIT_BYTES = 512 * 1024 * 1024
"""After so many new bytes the data is synced and recorded; a kill loses at most this and what is under way."""
_MOST_OPEN_FILES = 32
"""Finished files stay open until they are recorded; after so many of them this is done, whatever their size."""
_OTHER_DESCRIPTORS, _DESCRIPTORS_A_FILE = 48, 4
"""What the process needs besides, and how many an output file takes: it is open twice, and more of them are in work."""


def _most_open_files() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _MOST_OPEN_FILES
    return max(1, min(_MOST_OPEN_FILES, (allowed - _OTHER_DESCRIPTORS) // _DESCRIPTORS_A_FILE))


class BlockItem(NamedTuple):
    """A block to write, of the file with a number; `earlier` is what a journal says of all its segments, or nothing."""

    file: int
    block: Block
    earlier: tuple[SegmentDone, ...]


class Finished(NamedTuple):
    """A block whose bytes are written, with its segments; `resumed` where an earlier run had written them."""

    block: Block
    done: tuple[SegmentDone, ...]
    resumed: bool


class WriteBlock:
    """Computes a block and writes it: the `Work` of a conversion."""

    def __init__(self, files: Sequence[OutputFile], writer: BlockWriter) -> None:
        self._files = tuple(files)
        self._writer = writer

    def check(self) -> None:
        """Make sure that this process sees the planned source and the run's output.

        Raises:
            PrepError, OSError: it does not.
        """
        self._writer.check()
        self._files = tuple(_as_seen_here(self._files))

    def __call__(self, item: BlockItem, buffer: fp8.U8) -> Finished:
        """Write one block, unless an earlier run's bytes are still there."""
        file, block = self._files[item.file], item.block
        if item.earlier and self._writer.is_intact(block, item.earlier, buffer):
            return Finished(block, item.earlier, True)
        tally, digests = Tally(), SegmentDigests()
        with closing(open_reader(file.source)) as source:
            chunks = output_chunks(file, source, block.start, block.end, buffer, tally)
            etag = self._writer.put(block, _digested(chunks, digests))
            check_unchanged(file, source.state())
        tallies = [tally, *(Tally() for _ in block.segments[1:])]
        done = (
            SegmentDone(block.name, number, digest, counted, etag)
            for number, digest, counted in zip(block.segments, digests.digests(), tallies, strict=True)
        )
        return Finished(block, tuple(done), False)


class Execution:
    """One run over the mapped files; `results` and `resumed_bytes` are complete after `execute`."""

    def __init__(self, files: Iterable[OutputFile], run: Run) -> None:
        self._files = tuple(files)
        self._run = run
        self._left = Counter({file.name: len(list(self._blocks(file))) for file in self._files})
        self._most_open = _most_open_files()
        self._uncommitted: list[Finished] = []
        self.results: dict[tuple[str, int], SegmentDone] = {}
        self.resumed_bytes = 0

    def execute(self, engine: Engine, chunk_size: int, meter: Meter) -> None:
        """Write every block; blocks that an earlier run committed and that are still intact are kept.

        Raises:
            PrepError, OSError: a block failed. What was synced before is recorded.
        """
        items, count = self._items(self._run.read_done()), self._left.total()
        writer = self._run.share() if engine.is_remote else self._run.writer
        buffer_size = writer.buffer_bytes(chunk_size, (file.size for file in self._files))
        work = WriteBlock(self._files, writer)
        try:
            with closing(engine.run(work, items, count, buffer_size)) as pieces:
                for finished in pieces:
                    self._uncommitted.append(finished)
                    meter.add(finished.block.nbytes)
                    if self._is_commit_due():
                        self._commit(writer)
            self._commit(writer)
        except BaseException:
            with suppress(OSError, PrepError):  # The error that stopped the run is the one to tell.
                self._commit(writer)
            raise
        finally:
            writer.abandon()

    def _blocks(self, file: OutputFile) -> Iterator[Block]:
        return blocks(file.name, file.size, self._run.block_bytes(file.size))

    def _items(self, earlier: Mapping[tuple[str, int], SegmentDone]) -> Iterator[Iterator[BlockItem]]:
        """The work, by file."""

        def of_file(number: int, file: OutputFile) -> Iterator[BlockItem]:
            for block in self._blocks(file):
                found = [earlier.get((file.name, segment)) for segment in block.segments]
                done = tuple(item for item in found if item is not None)
                yield BlockItem(number, block, done if len(done) == len(found) else ())

        return (of_file(number, file) for number, file in enumerate(self._files))

    def _is_commit_due(self) -> bool:
        new_bytes = sum(finished.block.nbytes for finished in self._uncommitted if not finished.resumed)
        return new_bytes >= COMMIT_BYTES or len(self._uncommitted) >= self._most_open

    def _commit(self, writer: BlockWriter) -> None:
        finished, self._uncommitted = self._uncommitted, []
        names = {item.block.name for item in finished}
        for name in names:
            writer.sync(name)
        self._run.record(_new(finished))
        for item in finished:
            self.results.update(((done.file, done.segment), done) for done in item.done)
            self._left[item.block.name] -= 1
            self.resumed_bytes += item.block.nbytes if item.resumed else 0
        for name in names:
            if not self._left[name]:
                writer.close_file(name)


def _digested(chunks: Chunks, digests: SegmentDigests) -> Chunks:
    for offset, chunk in chunks:
        digests.update(chunk)
        yield offset, chunk


def _new(finished: Iterable[Finished]) -> Sequence[SegmentDone]:
    return [done for item in finished if not item.resumed for done in item.done]


def _as_seen_here(files: Sequence[OutputFile]) -> Iterator[OutputFile]:
    """The files with the states that this machine gives: the number of an inode may be another one on each.

    Of a store only the first file is asked for, as every read asks for the planned version.
    """
    for position, file in enumerate(files):
        if position and not isinstance(file.source, Path):
            yield file
            continue
        yield replace(file, state=check_same_here(file.source, file.state))


def check_unchanged(file: OutputFile, now: FileState) -> None:
    """Nothing read from a file that changed since it was planned may be recorded as done.

    Raises:
        ConversionError: `now`, the source's state, is not the planned one.
    """
    if now != file.state:
        raise ConversionError(
            f"{file.source} changed while it was being converted. Nothing was published. Make sure that nothing "
            "writes to the checkpoint, and convert again with --overwrite.",
            code="source-changed",
        )

"""Writes the mapped files of a plan into a run's output, block by block, and records what is durable."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError, PrepError
from deepinfer_prep.files.digests import SegmentDigests
from deepinfer_prep.files.storage import FileState, open_reader
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.workers import Meter, interleave, run_parallel
from deepinfer_prep.writing.journal import SegmentDone
from deepinfer_prep.writing.output_bytes import Tally, output_chunks
from deepinfer_prep.writing.target import Block, Chunks, Run, blocks

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


@dataclass(frozen=True, slots=True)
class _Work:
    """One unit of work; `earlier` is what a journal says of all its segments, or nothing."""

    file: OutputFile
    block: Block
    earlier: tuple[SegmentDone, ...]


class _Finished(NamedTuple):
    block: Block
    done: tuple[SegmentDone, ...]
    resumed: bool


class Execution:
    """One run over the mapped files; `results` and `resumed_bytes` are complete after `execute`."""

    def __init__(self, files: Iterable[OutputFile], run: Run) -> None:
        self._files = tuple(files)
        self._run = run
        self._left = Counter({file.name: len(list(self._blocks(file))) for file in self._files})
        self._most_open = _most_open_files()
        self._uncommitted: list[_Finished] = []
        self.results: dict[tuple[str, int], SegmentDone] = {}
        self.resumed_bytes = 0

    def execute(self, workers: int, chunk_size: int, meter: Meter) -> None:
        """Write every block; blocks that an earlier run committed and that are still intact are kept.

        Raises:
            PrepError, OSError: a block failed. What was synced before is recorded.
        """
        buffer_size = self._run.buffer_bytes(chunk_size, (file.size for file in self._files))
        work = self._work(self._run.read_done(), workers)
        try:
            with closing(run_parallel(work, self._write, workers, buffer_size)) as pieces:
                for finished in pieces:
                    self._uncommitted.append(finished)
                    meter.add(finished.block.nbytes)
                    if self._is_commit_due():
                        self._commit()
            self._commit()
        except BaseException:
            with suppress(OSError, PrepError):  # The error that stopped the run is the one to tell.
                self._commit()
            raise
        finally:
            self._run.abandon()

    def _blocks(self, file: OutputFile) -> Iterator[Block]:
        return blocks(file.name, file.size, self._run.block_bytes(file.size))

    def _work(self, earlier: dict[tuple[str, int], SegmentDone], workers: int) -> Iterator[_Work]:
        def of_file(file: OutputFile) -> Iterator[_Work]:
            for block in self._blocks(file):
                found = [earlier.get((file.name, number)) for number in block.segments]
                done = tuple(item for item in found if item is not None)
                yield _Work(file, block, done if len(done) == len(found) else ())

        # Workers mostly in files of their own: a file system may let one thread at a time write to a file.
        return interleave(map(of_file, self._files), workers)

    def _write(self, work: _Work, buffer: fp8.U8) -> _Finished:
        block = work.block
        if work.earlier and self._run.is_intact(block, work.earlier, buffer):
            return _Finished(block, work.earlier, True)
        tally, digests = Tally(), SegmentDigests()
        with closing(open_reader(work.file.source)) as source:
            chunks = output_chunks(work.file, source, block.start, block.end, buffer, tally)
            self._run.put(block, _digested(chunks, digests))
            check_unchanged(work.file, source.state())
        tallies = [tally, *(Tally() for _ in block.segments[1:])]
        done = (
            SegmentDone(block.name, number, digest, counted)
            for number, digest, counted in zip(block.segments, digests.digests(), tallies, strict=True)
        )
        return _Finished(block, tuple(done), False)

    def _is_commit_due(self) -> bool:
        new_bytes = sum(finished.block.nbytes for finished in self._uncommitted if not finished.resumed)
        return new_bytes >= COMMIT_BYTES or len(self._uncommitted) >= self._most_open

    def _commit(self) -> None:
        finished, self._uncommitted = self._uncommitted, []
        names = {item.block.name for item in finished}
        self._run.commit(names, _new(finished))
        for item in finished:
            self.results.update(((done.file, done.segment), done) for done in item.done)
            self._left[item.block.name] -= 1
            self.resumed_bytes += item.block.nbytes if item.resumed else 0
        for name in names:
            if not self._left[name]:
                self._run.close_file(name)


def _digested(chunks: Chunks, digests: SegmentDigests) -> Chunks:
    for offset, chunk in chunks:
        digests.update(chunk)
        yield offset, chunk


def _new(finished: Iterable[_Finished]) -> Sequence[SegmentDone]:
    return [done for item in finished if not item.resumed for done in item.done]


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

"""Writes the mapped files of a plan into a workspace, segment by segment, and records what is durable."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError
from deepinfer_prep.files.digests import digest_range
from deepinfer_prep.files.segments import segments
from deepinfer_prep.files.storage import DirectWriter, FileState, RangeWriter, open_reader
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.workers import Meter, interleave, run_parallel
from deepinfer_prep.writing.journal import Journal, SegmentDone
from deepinfer_prep.writing.output_bytes import Tally, output_chunks
from deepinfer_prep.writing.workspace import Workspace

COMMIT_BYTES = 512 * 1024 * 1024
"""After so many new bytes the data is synced and recorded; a kill loses at most this and what is under way."""
_COMMIT_FILES = 32
"""The same for files: at most so many are finished, open and wait for it."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """One unit of work; `earlier` is what a journal says of it."""

    file: OutputFile
    number: int
    start: int
    end: int
    earlier: SegmentDone | None

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class _Finished(NamedTuple):
    segment: _Segment
    done: SegmentDone
    resumed: bool


class _Writers:
    """The output files that are open, shared by all threads; each stays open until it was synced."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._open: dict[str, DirectWriter] = {}
        self._lock = threading.Lock()

    def get(self, file: OutputFile) -> DirectWriter:
        """The writer of a file, opened and given its final size at first use."""
        with self._lock:
            writer = self._open.get(file.name)
            if writer is None:
                writer = DirectWriter(self._workspace.path(file.name))
                try:
                    writer.resize(file.size)
                except BaseException:
                    writer.close()
                    raise
                self._open[file.name] = writer
            return writer

    def sync(self, name: str) -> None:
        """Sync one file."""
        with self._lock:
            writer = self._open[name]
        writer.sync()

    def close(self, name: str) -> None:
        """Close one file."""
        with self._lock:
            self._open.pop(name).close()

    def close_all(self) -> None:
        """Close what an error left open."""
        for name in list(self._open):
            with suppress(OSError):  # None of it counts as written.
                self.close(name)


class Execution:
    """One run over the mapped files; `results` and `resumed_bytes` are complete after `run`."""

    def __init__(self, files: Iterable[OutputFile], workspace: Workspace, journal: Journal) -> None:
        self._files = tuple(files)
        self._journal = journal
        self._writers = _Writers(workspace)
        self._left = Counter({file.name: len(list(segments(file.size))) for file in self._files})
        self._uncommitted: list[_Finished] = []
        self.results: dict[tuple[str, int], SegmentDone] = {}
        self.resumed_bytes = 0

    def run(self, earlier: dict[tuple[str, int], SegmentDone], workers: int, chunk_size: int, meter: Meter) -> None:
        """Write every segment; segments of `earlier` whose bytes still have their digest are kept.

        Raises:
            ConversionError, OSError: a segment failed. What was synced before is recorded.
        """
        try:
            with closing(run_parallel(self._segments(earlier, workers), self._write, workers, chunk_size)) as pieces:
                for finished in pieces:
                    self._uncommitted.append(finished)
                    meter.add(finished.segment.nbytes)
                    if self._is_commit_due():
                        self._commit()
            self._commit()
        except BaseException:
            with suppress(OSError):  # The error that stopped the run is the one to tell.
                self._commit()
            raise
        finally:
            self._writers.close_all()

    def _segments(self, earlier: dict[tuple[str, int], SegmentDone], workers: int) -> Iterator[_Segment]:
        def of_file(file: OutputFile) -> Iterator[_Segment]:
            for number, (start, end) in enumerate(segments(file.size)):
                yield _Segment(file, number, start, end, earlier.get((file.name, number)))

        # Workers mostly in files of their own: a file system may let one thread at a time write to a file.
        return interleave(map(of_file, self._files), workers)

    def _write(self, segment: _Segment, buffer: fp8.U8) -> _Finished:
        writer = self._writers.get(segment.file)
        if segment.earlier is not None and _is_intact(segment, segment.earlier, writer, buffer):
            return _Finished(segment, segment.earlier, True)
        writer.reserve(segment.start, segment.end)
        tally, digest = Tally(), xxhash.xxh3_128()
        with closing(open_reader(segment.file.source)) as source:
            for offset, chunk in output_chunks(segment.file, source, segment.start, segment.end, buffer, tally):
                digest.update(chunk.data)
                writer.write_from(chunk.data, offset)
            check_unchanged(segment.file, source.state())
        done = SegmentDone(segment.file.name, segment.number, digest.hexdigest(), tally)
        return _Finished(segment, done, False)

    def _is_commit_due(self) -> bool:
        new_bytes = sum(finished.segment.nbytes for finished in self._uncommitted if not finished.resumed)
        return new_bytes >= COMMIT_BYTES or len(self._uncommitted) >= _COMMIT_FILES

    def _commit(self) -> None:
        finished, self._uncommitted = self._uncommitted, []
        names = {item.segment.file.name for item in finished}
        for name in names:
            self._writers.sync(name)
        self._journal.record(item.done for item in finished if not item.resumed)
        for item in finished:
            self.results[item.done.file, item.done.segment] = item.done
            self._left[item.done.file] -= 1
            self.resumed_bytes += item.segment.nbytes if item.resumed else 0
        for name in names:
            if not self._left[name]:
                self._writers.close(name)


def _is_intact(segment: _Segment, earlier: SegmentDone, writer: RangeWriter, buffer: fp8.U8) -> bool:
    try:
        return digest_range(writer, segment.start, segment.end, buffer) == earlier.digest
    except OSError:
        return False  # What cannot be read any more is written again.


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

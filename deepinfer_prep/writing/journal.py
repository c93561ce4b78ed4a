"""What an unfinished run has done so far, so that a later one can go on.

One JSON object a line: first the identity of the run, then each segment whose bytes are on stable storage.
A line is written only after its segment was synced. What follows the last whole entry is ignored, and cut
off before more is written: a kill can tear a line, a power cut can leave zeros.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_prep import fp8
from deepinfer_prep.files.storage import RangeWriter, sync_folder
from deepinfer_prep.writing.output_bytes import Tally

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """One finished segment: its digest (xxh3-128, hex) and what halving met in it."""

    file: str
    segment: int
    digest: str
    tally: Tally


class Journal:
    """Appends finished segments durably; begins anew where the file does not belong to the same run."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        found, _, self._end = _read(path)
        self._file = RangeWriter(path)
        try:
            if is_same_run(found, identity):
                self._file.resize(self._end)
            else:
                self._file.resize(0)
                self._end = 0
                self._append([{"format": FORMAT, **identity}])
                sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def record(self, segments: Iterable[SegmentDone]) -> None:
        """Append segments whose bytes are synced; returns once the journal is synced as well.

        Raises:
            OSError: they could not be written; what was recorded before stays readable.
        """
        self._append(
            {
                "file": done.file,
                "segment": done.segment,
                "digest": done.digest,
                "counts": [done.tally.counts.rounded, done.tally.counts.nan, done.tally.counts.above_240],
                "nan": done.tally.nan_codes,
            }
            for done in segments
        )

    def _append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        lines = b"".join(json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in entries)
        self._file.write_from(memoryview(lines), self._end)
        self._file.sync()
        self._end += len(lines)

    def close(self) -> None:
        """Close the file; what was recorded stays."""
        self._file.close()


def read_identity(path: Path) -> Mapping[str, Any] | None:
    """The identity of the run that wrote a journal; None where there is no complete first line."""
    return _read(path)[0]


def is_same_run(found: Mapping[str, Any] | None, identity: Mapping[str, Any]) -> bool:
    """Whether the identity found in a journal is this one, once it has gone through JSON."""
    return bool(found == json.loads(json.dumps(identity)))


def read_done(path: Path) -> dict[tuple[str, int], SegmentDone]:
    """The finished segments of a journal by file name and segment number; empty where there is no journal."""
    return {(done.file, done.segment): done for done in _read(path)[1]}


def _read(path: Path) -> tuple[dict[str, Any] | None, list[SegmentDone], int]:
    """Identity, finished segments, and the length in bytes of the whole entries."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return None, [], 0
    identity = _parse(lines[0]) if lines else None
    if identity is None or identity.pop("format", None) != FORMAT:
        return None, [], 0
    done, end = [], len(lines[0])
    for line in lines[1:]:
        segment = _parse_segment(line)
        if segment is None:
            break
        done.append(segment)
        end += len(line)
    return identity, done, end


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _parse_segment(line: bytes) -> SegmentDone | None:
    match _parse(line):
        case {
            "file": str(file),
            "segment": int(segment),
            "digest": str(digest),
            "counts": [int(rounded), int(nan), int(above_240)],
            "nan": dict(nan_codes),
        }:
            return SegmentDone(file, segment, digest, Tally(fp8.CodeCounts(rounded, nan, above_240), nan_codes))
    return None

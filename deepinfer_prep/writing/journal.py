"""The journal: a file that records which segments an unfinished run has written, so that a later run can resume.

One JSON object a line: first the identity of the run, then each segment whose bytes are on stable storage.
A line is written only after its segment was synced. What follows the last whole entry is ignored, and cut
off before more is written: a kill can tear a line, a power cut can leave zeros.

The journal is believed as the user's own file: the workspace lets in nobody else, and a segment counts as done where
its bytes still have the digest that the journal states.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_prep import fp8
from deepinfer_prep.files.folders import Folder
from deepinfer_prep.files.storage import RangeWriter
from deepinfer_prep.files.untrusted import JOURNAL_LINE, MANIFEST, JsonError, parse_object
from deepinfer_prep.writing.output_bytes import Tally

FORMAT = 1
JOURNAL_NAME = "journal"


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """One finished segment: its digest (xxh3-128, hex) and what halving met in it."""

    file: str
    segment: int
    digest: str
    tally: Tally
    etag: str = ""
    """What a store calls the bytes that the segment was written with; empty in a folder."""


class Journal:
    """Appends finished segments durably; begins anew where the file does not belong to the same run."""

    def __init__(self, folder: Folder, identity: Mapping[str, Any]) -> None:
        found, _, self._end = _read(folder)
        self._file = RangeWriter(folder.path / JOURNAL_NAME, folder.open_own)
        try:
            if is_same_run(found, identity):
                self._file.resize(self._end)
            else:
                self._file.resize(0)
                self._end = 0
                self._append([{"format": FORMAT, **identity}])
                folder.sync()
        except BaseException:
            self._file.close()
            raise

    def record(self, segments: Iterable[SegmentDone]) -> None:
        """Append segments whose bytes are synced; returns once the journal is synced as well.

        Raises:
            OSError: they could not be written; what was recorded before stays readable.
        """
        self._append(encode_segment(done) for done in segments)

    def _append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        lines = b"".join(json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in entries)
        self._file.write_from(memoryview(lines), self._end)
        self._file.sync()
        self._end += len(lines)

    def close(self) -> None:
        """Close the file; what was recorded stays."""
        self._file.close()


def read_identity(folder: Folder) -> Mapping[str, Any] | None:
    """The identity of the run whose journal lies in a folder; None where there is no complete first line."""
    return _read(folder)[0]


def is_same_run(found: Mapping[str, Any] | None, identity: Mapping[str, Any]) -> bool:
    """Whether the identity found in a journal is this one, once it has gone through JSON."""
    return bool(found == json.loads(json.dumps(identity)))


def read_done(folder: Folder) -> dict[tuple[str, int], SegmentDone]:
    """The finished segments of a journal by file name and segment number; empty where there is no journal."""
    return {(done.file, done.segment): done for done in _read(folder)[1]}


def _read(folder: Folder) -> tuple[dict[str, Any] | None, list[SegmentDone], int]:
    """Identity, finished segments, and the length in bytes of the whole entries."""
    try:
        lines = folder.read(JOURNAL_NAME, MANIFEST.nbytes).splitlines(keepends=True)
    except FileNotFoundError:
        return None, [], 0
    except JsonError:
        return None, [], 0  # No run writes one of this size.
    identity = _parse(lines[0]) if lines else None
    if identity is None or identity.pop("format", None) != FORMAT:
        return None, [], 0
    done, end = [], len(lines[0])
    for line in lines[1:]:
        segment = decode_segment(line)
        if segment is None:
            break
        done.append(segment)
        end += len(line)
    return identity, done, end


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return parse_object(line, JOURNAL_LINE)
    except JsonError:
        return None


def encode_segment(done: SegmentDone) -> dict[str, Any]:
    """A finished segment as an entry of a journal."""
    return {
        "file": done.file,
        "segment": done.segment,
        "digest": done.digest,
        "counts": [done.tally.counts.rounded, done.tally.counts.nan, done.tally.counts.above_240],
        "nan": done.tally.nan_codes,
        **({"etag": done.etag} if done.etag else {}),
    }


def decode_segment(line: bytes) -> SegmentDone | None:
    """The finished segment of a journal's line; None where it is none, or not whole."""
    match _parse(line):
        case {
            "file": str(file),
            "segment": int(segment),
            "digest": str(digest),
            "counts": [rounded, nan, above_240],
            "nan": dict(nan_codes),
            **more,
        } if all(
            type(count) is int and count >= 0 for count in (segment, rounded, nan, above_240, *nan_codes.values())
        ):
            tally = Tally(fp8.CodeCounts(rounded, nan, above_240), nan_codes)
            return SegmentDone(file, segment, digest, tally, str(more.get("etag", "")))
    return None

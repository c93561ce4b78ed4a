"""What an unfinished run has done so far, so that a later one can go on.

One JSON object a line: first the identity of the run, then each segment whose bytes are on stable storage.
A line is written only after its segment was synced. A torn last line is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_prep import fp8
from deepinfer_prep.transform import Tally

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """One finished segment: its digest (xxh3-128, hex) and what halving met in it."""

    file: str
    segment: int
    digest: str
    tally: Tally


class Journal:
    """Appends finished segments durably."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        new = not path.exists() or _read_identity(path) is None
        self._file = path.open("wb" if new else "r+b")
        if new:
            self._append([{"format": FORMAT, **identity}])
        else:
            self._file.truncate(_whole_lines(path))
            self._file.seek(0, os.SEEK_END)

    def record(self, segments: Iterable[SegmentDone]) -> None:
        """Append segments whose bytes are synced; returns once the journal is synced as well."""
        self._append(
            {
                "file": done.file,
                "segment": done.segment,
                "digest": done.digest,
                "counts": [done.tally.counts.rounded, done.tally.counts.nan, done.tally.counts.misread],
                "nan": done.tally.nan_codes,
            }
            for done in segments
        )

    def _append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        for entry in entries:
            self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file; what was recorded stays."""
        self._file.close()


def read_identity(path: Path) -> Mapping[str, Any] | None:
    """The identity of the run that wrote a journal; None where there is no complete first line."""
    return _read_identity(path) if path.exists() else None


def read_done(path: Path) -> dict[tuple[str, int], SegmentDone]:
    """The finished segments of a journal by file name and segment number."""
    done = {}
    for line in path.read_bytes().split(b"\n")[1:]:
        entry = _parse(line)
        if entry is None:
            break
        tally = Tally(fp8.CodeCounts(*entry["counts"]), entry["nan"])
        done[entry["file"], entry["segment"]] = SegmentDone(entry["file"], entry["segment"], entry["digest"], tally)
    return done


def _read_identity(path: Path) -> dict[str, Any] | None:
    with path.open("rb") as file:
        line = file.readline()
    entry = _parse(line) if line.endswith(b"\n") else None
    if entry is not None and entry.pop("format", None) == FORMAT:
        return entry
    return None


def _whole_lines(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None

"""xxh3-128 digests of a file's fixed 64 MiB segments."""

from __future__ import annotations

import xxhash

from deepinfer_prep import fp8
from deepinfer_prep.files import segments
from deepinfer_prep.files.storage import RangeWriter, Reader


class SegmentDigests:
    """Digests a stream of bytes segment by segment."""

    def __init__(self) -> None:
        self._finished: list[str] = []
        self._current = xxhash.xxh3_128()
        self._room = segments.SEGMENT_BYTES

    def update(self, data: fp8.U8) -> None:
        """Add the next bytes of the file."""
        while data.size:
            part = data[: self._room]
            self._current.update(part.data)
            self._room -= part.size
            data = data[part.size :]
            if self._room == 0:
                self._finished.append(self._current.hexdigest())
                self._current = xxhash.xxh3_128()
                self._room = segments.SEGMENT_BYTES

    def digests(self) -> tuple[str, ...]:
        """One digest a segment, in hex; an empty file has the digest of no bytes."""
        if self._room == segments.SEGMENT_BYTES and self._finished:
            return tuple(self._finished)
        return (*self._finished, self._current.hexdigest())


def digest_range(file: Reader | RangeWriter, start: int, end: int, buffer: fp8.U8) -> str:
    """The digest of bytes start..end of a file, in hex.

    Raises:
        PrepError: the file ends before `end`.
        OSError: a read failed.
    """
    digest = xxhash.xxh3_128()
    for position in range(start, end, buffer.size):
        chunk = buffer[: min(buffer.size, end - position)]
        file.read_into(chunk.data, position)
        digest.update(chunk.data)
    return digest.hexdigest()

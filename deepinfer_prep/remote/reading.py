"""Ranged reads of one remote file: few requests, and a broken one is asked for again from where it broke."""

from __future__ import annotations

import time
from typing import Protocol

from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.storage import GAP_BYTES, FileState, Place, StoredPlace

MOST_FAILURES = 6
"""Requests that bring nothing, one after another, before a read is given up."""
FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
_READ_BYTES = 1024 * 1024


class BrokenStreamError(Exception):
    """A connection broke, or an answer ended early."""


class Stream(Protocol):
    """The body of one answer."""

    def read_into(self, buffer: memoryview) -> int:
        """Read some bytes, at least one; 0 at the end.

        Raises:
            BrokenStreamError: the connection broke or the answer was cut: the rest can be asked for again.
        """

    def close(self) -> None:
        """Give the connection up."""


class RangeStore(Protocol):
    """What reading needs of a store."""

    def open_range(self, name: str, state: FileState, start: int, end: int) -> Stream:
        """Ask for bytes start..end of a file in the given state.

        Raises:
            PrepError: it changed, or it cannot be read.
            BrokenStreamError: no answer came; asking again may help.
        """


class RemoteReader:
    """Reads a file in one state; a file that changed since is an error of the store."""

    def __init__(self, place: StoredPlace, store: RangeStore, key: str, state: FileState) -> None:
        self.place: Place = place
        self._store = store
        self._key = key
        self._state = state
        self._stream: Stream | None = None
        self._position = 0
        self._end = 0
        self._expected = (0, 0)

    def size(self) -> int:
        """The file's size in bytes."""
        return self._state.size

    def state(self) -> FileState:
        """The state that every request asks for."""
        return self._state

    def expect(self, start: int, end: int) -> None:
        """Fetch all of start..end with one request, once its first byte is read."""
        first, last = self._expected
        if not first <= start <= end <= last:
            self._expected = (start, end)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`.

        Raises:
            PrepError: the file changed or ends before the buffer is full, or the store does not answer.
        """
        if offset + len(buffer) > self._state.size:
            raise PrepError(
                f"{self.place} has {self._state.size:,} bytes, and {len(buffer):,} were asked for from byte "
                f"{offset:,}: it is not what its header says. Upload it again.",
                code="file-cut",
            )
        done = failures = 0
        while done < len(buffer):
            try:
                stream = self._stream_at(offset + done, offset + len(buffer))
                count = stream.read_into(buffer[done : done + _READ_BYTES])
                if count == 0:
                    raise BrokenStreamError("the answer ended early")
            except BrokenStreamError as error:
                self._drop()
                failures += 1
                if failures == MOST_FAILURES:
                    raise PrepError(
                        f"{self.place}: bytes {offset + done:,} to {offset + len(buffer):,} could not be read in "
                        f"{failures} attempts: {error}. Check the network and the store, and run the command again.",
                        code="unreachable",
                    ) from None
                time.sleep(min(FIRST_PAUSE_SECONDS * 2 ** (failures - 1), _LONGEST_PAUSE_SECONDS))
            else:
                failures = 0
                done += count
                self._position += count
                if self._position == self._end:
                    self._drop()
                    self._expected = (0, 0)

    def close(self) -> None:
        """Give up a request that is under way."""
        self._drop()

    def _stream_at(self, start: int, end: int) -> Stream:
        if self._stream is not None and 0 < start - self._position < min(GAP_BYTES, self._end - self._position):
            self._read_over(self._stream, start)
        if self._stream is None or self._position != start:
            self._drop()
            first, last = self._expected
            self._end = max(end, last) if first <= start < last else end
            self._stream = self._store.open_range(self._key, self._state, start, self._end)
            self._position = start
        return self._stream

    def _read_over(self, stream: Stream, until: int) -> None:
        gap = memoryview(bytearray(until - self._position))
        while self._position < until:
            count = stream.read_into(gap[: until - self._position])
            if count == 0:
                raise BrokenStreamError("the answer ended early")
            self._position += count

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

"""An output file that can be read before it is written, or where what was written cannot be read back."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.segments import new_buffer
from deepinfer_prep.files.storage import FileState, Readable, Reader, open_reader
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.writing.output_bytes import output_chunks
from deepinfer_prep.writing.sidecar import SidecarFile, file_chunks

_CHUNK_BYTES = 4 * 1024 * 1024


class ComputedBytes(Readable):
    """The bytes of a planned file, computed from its source whenever they are read."""

    def __init__(self, file: OutputFile) -> None:
        self.file = file

    @property
    def name(self) -> str:
        """The file's name in the output."""
        return self.file.name

    def __str__(self) -> str:
        return f"{self.file.source}, converted"

    def open_reader(self) -> Reader:
        """Open the source."""
        return _ComputedReader(self)


class _ComputedReader:
    def __init__(self, place: ComputedBytes) -> None:
        self.place: Path | Readable = place
        self._file = place.file
        self._source = open_reader(place.file.source)

    def size(self) -> int:
        return self._file.size

    def state(self) -> FileState:
        return self._source.state()

    def expect(self, start: int, end: int) -> None:
        """The same of the source, whose data section has as many bytes."""
        first, last = (max(0, offset - len(self._file.header)) for offset in (start, end))
        self._source.expect(self._file.source_start + first, self._file.source_start + last)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if offset + len(buffer) > self._file.size:
            raise PrepError(f"{self.place} ends before byte {offset + len(buffer):,}.", code="file-cut")
        out = np.frombuffer(buffer, dtype=np.uint8)
        scratch = new_buffer(min(len(buffer), _CHUNK_BYTES))
        for position, chunk in output_chunks(self._file, self._source, offset, offset + len(buffer), scratch, None):
            out[position - offset :][: chunk.size] = chunk

    def close(self) -> None:
        self._source.close()


class ComputedSidecar(Readable):
    """The bytes of a file of the sidecar, computed when the first of them is read and kept from then on."""

    def __init__(self, file: SidecarFile) -> None:
        self._file = file
        self._bytes: fp8.U8 | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The file's name in the output."""
        return self._file.name

    def __str__(self) -> str:
        return f"{self._file.name}, computed"

    def open_reader(self) -> Reader:
        """Read from memory."""
        return _MemoryReader(self)

    def contents(self) -> fp8.U8:
        """All bytes of the file.

        Raises:
            PrepError, OSError: what they are computed from cannot be read.
        """
        with self._lock:
            if self._bytes is None:
                self._bytes = np.concatenate(list(file_chunks(self._file)))
            return self._bytes


class _MemoryReader:
    def __init__(self, place: ComputedSidecar) -> None:
        self.place: Path | Readable = place
        self._contents = place.contents

    def size(self) -> int:
        return self._contents().size

    def state(self) -> FileState:
        return FileState(self.size(), 0)

    def expect(self, start: int, end: int) -> None:
        """Nothing: all of it is in memory."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        np.frombuffer(buffer, dtype=np.uint8)[:] = self._contents()[offset : offset + len(buffer)]

    def close(self) -> None:
        """Nothing is open."""

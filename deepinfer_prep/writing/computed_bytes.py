"""An output file that can be read before it is written, or where what was written cannot be read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.segments import new_buffer
from deepinfer_prep.files.storage import FileState, Readable, Reader, open_reader
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.writing.output_bytes import output_chunks

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
        """Nothing: each read says what it needs of the source."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if offset + len(buffer) > self._file.size:
            raise PrepError(f"{self.place} ends before byte {offset + len(buffer):,}.", code="file-cut")
        out = np.frombuffer(buffer, dtype=np.uint8)
        scratch = new_buffer(min(len(buffer), _CHUNK_BYTES))
        for position, chunk in output_chunks(self._file, self._source, offset, offset + len(buffer), scratch, None):
            out[position - offset :][: chunk.size] = chunk

    def close(self) -> None:
        self._source.close()

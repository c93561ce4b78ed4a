"""Ranged reads and writes of files: the one door between this package and where bytes lie.

Everything above reads and writes (offset, buffer) pairs through these two classes, so another store needs
only ranged reads and ranged writes to take their place.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from deepinfer_prep.errors import PrepError


class _RangedFile:
    """A file that closes itself and can be read; subclasses say how it is opened."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        """Close the descriptor; later calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def size(self) -> int:
        """The file's size in bytes."""
        return os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`.

        Raises:
            PrepError: the file ends before the buffer is full.
            OSError: the read failed.
        """
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise PrepError(
                    f"{self.path} ends at byte {offset + done:,} where {len(buffer) - done:,} more bytes were "
                    "expected: it was cut while it was being read. Check that nothing else writes to it."
                )
            done += count

    def __enter__(self):  # type: ignore[no-untyped-def]  # Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RangeReader(_RangedFile):
    """Reads byte ranges of one file into buffers that the caller owns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDONLY)


class RangeWriter(_RangedFile):
    """Writes byte ranges of one file, which it creates where it does not exist; reads them back as well."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDWR | os.O_CREAT)

    def allocate(self, size: int) -> None:
        """Give the file its final size and, where the file system can, its blocks.

        Raises:
            OSError: no space is left, or the size is above a limit.
        """
        os.ftruncate(self._fd, size)
        if size:
            os.posix_fallocate(self._fd, 0, size)

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at `offset`.

        Raises:
            OSError: the write failed.
        """
        done = 0
        while done < len(buffer):
            done += os.pwrite(self._fd, buffer[done:], offset + done)

    def sync(self) -> None:
        """Return once the data is on stable storage.

        Raises:
            OSError: the file system reported a failed write, of this or of an earlier call.
        """
        os.fdatasync(self._fd)


def sync_folder(path: Path) -> None:
    """Make the entries of a folder (new names, renames) durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file_durably(path: Path, data: bytes) -> None:
    """Write a small file in full under a temporary name, sync it, and give it its name."""
    temporary = path.with_name(path.name + ".tmp")
    with RangeWriter(temporary) as file:
        file.allocate(len(data))
        file.write_from(memoryview(data), 0)
        file.sync()
    os.replace(temporary, path)
    sync_folder(path.parent)

"""The one door to bytes: places, their state, ranged reads, and ranged writes of local files.

Everything above reads through `open_reader`, which knows local files by their `Path`; whatever else holds bytes is a
`StoredPlace` and brings its own reader.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from deepinfer_prep.errors import PrepError

DIRECT_BYTES = 4096
"""Direct writes take offsets, lengths and addresses that are multiples of this; no disk needs more."""

MOST_BUFFERS = 1024
"""What one call reads into at most: Linux's IOV_MAX."""

GAP_BYTES = 1024 * 1024
"""What lies between two ranges of a remote file is read over where it is less: another request would take longer."""

_MAP_NORESERVE = 0x4000
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells whether a file is still the one that was planned with."""

    size: int
    modified_ns: int
    """Of a local file; 0 elsewhere."""
    version: str = ""
    """What a store calls this very content, such as an ETag; empty for local files."""
    inode: int = 0
    changed_ns: int = 0
    """Of a local file: what its name leads to, and when the system last changed anything of it; 0 elsewhere."""
    permissions: int = field(default=0o777, compare=False)
    """Permission bits: nobody may read more of what is made from the file."""

    @classmethod
    def of(cls, place: Place) -> FileState:
        """The state of a file now; links are followed.

        Raises:
            PrepError, OSError: there is no such file, or it cannot be reached.
        """
        return cls.from_status(place.stat()) if isinstance(place, Path) else place.state()

    @classmethod
    def now(cls, place: Place) -> FileState:
        """The same, but asks the store again where an earlier answer is at hand."""
        return cls.from_status(place.stat()) if isinstance(place, Path) else place.state_now()

    @classmethod
    def from_status(cls, status: os.stat_result) -> FileState:
        """The state that the file system tells."""
        permissions = status.st_mode & 0o777
        return cls(status.st_size, status.st_mtime_ns, "", status.st_ino, status.st_ctime_ns, permissions)

    @property
    def marks(self) -> tuple[int | str, ...]:
        """The state as plain values for a journal."""
        return (self.size, self.version) if self.version else (self.size, self.modified_ns)


def check_same_here(place: Place, planned: FileState) -> FileState:
    """The state of a file as this machine sees it, which may number inodes otherwise than the one that planned.

    Raises:
        PrepError: it is another file.
        OSError: it is not there, or cannot be reached.
    """
    found = FileState.now(place)
    if found.marks != planned.marks:
        raise PrepError(
            f"{place} is another file here: {found.size:,} bytes instead of {planned.size:,}, or written at another "
            "time. Every machine has to see the same files under the same paths.",
            code="file-differs",
        )
    return found


class Reader(Protocol):
    """Reads byte ranges of one file into buffers that the caller owns; for one thread at a time."""

    @property
    def place(self) -> Path | Readable:
        """Where the file lies, for messages."""

    def size(self) -> int:
        """The file's size in bytes."""

    def state(self) -> FileState:
        """The state of the file that is open."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`.

        Raises:
            PrepError: the file ends before the buffer is full, or changed since it was first seen.
            OSError: the read failed.
        """

    def expect(self, start: int, end: int) -> None:
        """Say that bytes start..end are read next, in order, but for gaps below `GAP_BYTES`.

        Where every request takes long, one fetches them all. A range within one that is expected adds nothing.
        """

    def close(self) -> None:
        """Close the file; later calls do nothing."""


class Readable(ABC):
    """Something that holds bytes and is not a local file."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of its path."""

    @abstractmethod
    def open_reader(self) -> Reader:
        """Open it for ranged reads."""


class StoredPlace(Readable):
    """A file or folder that is not local; it has the part of `Path`'s interface that this package uses to read."""

    @property
    @abstractmethod
    def parent(self) -> StoredPlace:
        """The folder that holds it."""

    @abstractmethod
    def __truediv__(self, name: str) -> StoredPlace:
        """A place below this one."""

    @abstractmethod
    def is_file(self) -> bool:
        """Whether it is a file."""

    @abstractmethod
    def is_dir(self) -> bool:
        """Whether it is a folder."""

    @abstractmethod
    def iterdir(self) -> Iterable[StoredPlace]:
        """The files and folders right below it."""

    @abstractmethod
    def read_bytes(self) -> bytes:
        """All of a small file.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def state(self) -> FileState:
        """The state of the file, as it was first seen."""

    @abstractmethod
    def state_now(self) -> FileState:
        """The state of the file at this moment."""

    @property
    def pinned_url(self) -> str:
        """An address at which the very same content stays; empty where the store has none."""
        return ""

    def exists(self) -> bool:
        """Whether there is such a file or folder."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """No store has links."""
        return False

    def resolve(self) -> StoredPlace:
        """Itself, as no store has links."""
        return self


Place = Path | StoredPlace
"""Where a file or folder lies."""


def absolute(place: Place) -> Place:
    """The place by a name that means the same in every working directory."""
    return Path(os.path.abspath(place)) if isinstance(place, Path) else place


def open_reader(place: Path | Readable) -> Reader:
    """Open a file for ranged reads.

    Raises:
        PrepError, OSError: it cannot be opened.
    """
    return RangeReader(place) if isinstance(place, Path) else place.open_reader()


Opener = Callable[[Path, int, int], int]
"""Opens a file like `os.open(path, flags, mode)`: a folder that is held open brings one that follows no links."""


def _open_regular(path: Path, flags: int, mode: int) -> int:
    """Open a regular file and nothing else; a plain open of a pipe would wait for ever."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _no_file(path, "a socket") from None
        raise
    found = os.fstat(descriptor).st_mode
    if stat.S_ISREG(found):
        return descriptor
    os.close(descriptor)
    raise _no_file(path, "a folder" if stat.S_ISDIR(found) else "a pipe or device")


def _no_file(path: Path, what: str) -> PrepError:
    return PrepError(
        f"{path} is {what}, where a file was expected. Move it away or fetch the file again.", code="not-a-file"
    )


class _RangedFile:
    """A file that closes itself and can be read; subclasses say how it is opened. Every OSError names the file."""

    def __init__(self, path: Path, flags: int, opener: Opener) -> None:
        self.place = path
        self._fd = opener(path, flags | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        """Close the descriptor; later calls do nothing.

        Raises:
            OSError: the file system reported a write that failed after the last `sync`.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with _named(self.place):
                os.close(fd)

    def status(self) -> os.stat_result:
        """Size, times and the rest of what the file system says of the open file."""
        with _named(self.place):
            return os.fstat(self._fd)

    def size(self) -> int:
        """The file's size in bytes."""
        return self.status().st_size

    def state(self) -> FileState:
        """The state of the open file."""
        return FileState.from_status(self.status())

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`.

        Raises:
            PrepError: the file ends before the buffer is full.
            OSError: the read failed.
        """
        done = 0
        while done < len(buffer):
            with _named(self.place):
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise PrepError(
                    f"{self.place} ends at byte {offset + done:,} where {len(buffer) - done:,} more bytes were "
                    "expected: it was cut while it was being read. Check that nothing else writes to it.",
                    code="file-cut",
                )
            done += count

    def __enter__(self):  # type: ignore[no-untyped-def]  # Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RangeReader(_RangedFile):
    """Reads byte ranges of one file into buffers that the caller owns.

    Raises:
        PrepError: the path is a folder, a pipe or a device: opening a pipe would wait for ever.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDONLY, _open_regular)

    def expect(self, start: int, end: int) -> None:
        """Nothing: the kernel reads ahead by itself."""

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill buffers (`MOST_BUFFERS` at most) from consecutive bytes, in one call where possible.

        Raises:
            PrepError: the file ends before the last buffer is full.
            OSError: the read failed.
        """
        with _named(self.place):
            done = os.preadv(self._fd, buffers, offset)
        position = 0
        for buffer in buffers:
            filled = min(max(done - position, 0), len(buffer))
            if filled < len(buffer):
                self.read_into(buffer[filled:], offset + position + filled)
            position += len(buffer)

    def will_need(self, offset: int, size: int) -> None:
        """Say that a byte range is read soon, so that many are fetched from storage at once; only advice."""
        os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def is_in_memory(self, offset: int) -> bool:
        """Whether the byte at `offset` can be had without waiting for storage, as far as the file system says."""
        try:
            os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT)
        except OSError as error:
            return error.errno != errno.EAGAIN
        return True

    def map_privately(self, size: int) -> ctypes.Array[ctypes.c_uint8]:
        """The file's first `size` bytes as memory; a page that is written to is copied, so the file never changes.

        It stays mapped until nothing refers to what is returned. Not by the module mmap: that keeps a descriptor of
        its own for each mapping before Python 3.13, and a checkpoint may have more shards than a process descriptors.

        Raises:
            OSError: the file system cannot map files, or the process may map no more.
        """
        # Private pages of a file that is larger than memory are refused unless nothing is reserved for them.
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(self.place))
        memory = (ctypes.c_uint8 * size).from_address(address)
        # Not at the end of the interpreter, when tensors over it may still be in use.
        weakref.finalize(memory, _munmap, address, size).atexit = False
        return memory


class Readers:
    """Opens files one at a time and keeps the last one open, for many small reads that mostly go to one file.

    For one thread: a reader is good until the next one is asked for.
    """

    def __init__(self) -> None:
        self._last: Reader | None = None

    def get(self, place: Path | Readable) -> Reader:
        """The reader of a file; the one of another file, which an earlier call returned, is closed.

        Raises:
            PrepError, OSError: as `open_reader`.
        """
        if self._last is None or self._last.place != place:
            self.close()
            self._last = open_reader(place)
        return self._last

    def close(self) -> None:
        """Close the file that is open."""
        last, self._last = self._last, None
        if last is not None:
            last.close()


class RangeWriter(_RangedFile):
    """Writes byte ranges of one file, which it creates where it does not exist; reads them back as well."""

    def __init__(self, path: Path, opener: Opener = os.open) -> None:
        super().__init__(path, os.O_RDWR | os.O_CREAT, opener)

    def resize(self, size: int) -> None:
        """Cut the file, or let it grow by a hole that reads as zeros.

        Raises:
            OSError: the size is above a limit.
        """
        with _named(self.place):
            os.ftruncate(self._fd, size)

    def allocate(self, size: int) -> None:
        """Give the file its final size and, where the file system can, its blocks.

        Raises:
            OSError: no space is left, or the size is above a limit.
        """
        self.resize(size)
        self.reserve(0, size)

    def reserve(self, start: int, end: int) -> None:
        """Give a byte range its blocks, where the file system can.

        Raises:
            OSError: no space is left.
        """
        if start < end:
            with _named(self.place):
                reserve_blocks(self._fd, start, end - start)

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` at `offset`.

        Raises:
            OSError: the write failed.
        """
        done = 0
        while done < len(buffer):
            with _named(self.place):
                count = os.pwrite(self._fd, buffer[done:], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file system took none of the bytes written to it")
            done += count

    def sync(self) -> None:
        """Return once the data is on stable storage.

        Raises:
            OSError: the file system reported a failed write, of this or of an earlier call.
        """
        with _named(self.place):
            os.fdatasync(self._fd)


class DirectWriter(RangeWriter):
    """Writes past the page cache, where file system and alignment allow it.

    Writing many gigabytes through the page cache pushes out what other programs need, and the kernel brakes
    the writer: direct writes ran up to seven times faster on a busy machine.
    """

    def __init__(self, path: Path, opener: Opener = os.open) -> None:
        super().__init__(path, opener)
        try:
            self._direct = opener(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o666)
        except OSError:  # The file itself is open: its file system only lacks direct writes.
            self._direct = -1

    def close(self) -> None:
        """Close both descriptors; later calls do nothing. Errors as `RangeWriter.close`."""
        direct, self._direct = self._direct, -1
        try:
            if direct >= 0:
                with _named(self.place):
                    os.close(direct)
        finally:
            super().close()

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer`, which starts at a multiple of `DIRECT_BYTES` in memory, at `offset`.

        What is not a whole number of blocks goes through the page cache.

        Raises:
            OSError: the write failed.
        """
        done = 0
        if self._direct >= 0 and offset % DIRECT_BYTES == 0:
            done = self._write_blocks(buffer[: len(buffer) // DIRECT_BYTES * DIRECT_BYTES], offset)
        super().write_from(buffer[done:], offset + done)

    def _write_blocks(self, blocks: memoryview, offset: int) -> int:
        """Write whole blocks; returns how many bytes the file system took directly."""
        done = 0
        while done < len(blocks):
            try:
                with _named(self.place):
                    count = os.pwrite(self._direct, blocks[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return done
                raise
            if count == 0 or count % DIRECT_BYTES:
                return done + count
            done += count
        return done


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a descriptor, which knows none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


_libc = ctypes.CDLL(None, use_errno=True)
# With 64-bit offsets everywhere: glibc calls that function fallocate64, musl knows no other.
_fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_mmap = getattr(_libc, "mmap64", None) or _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def reserve_blocks(fd: int, offset: int, size: int) -> None:
    """Reserve `size` bytes of a file on disk from `offset`; do nothing where the file system has no such call.

    Not os.posix_fallocate: where the file system cannot reserve (NFS before 4.2, so Amazon EFS), the C library
    imitates it by writing into every 4 KiB block, and everything would be written twice.

    Raises:
        OSError: no space is left.
    """
    while _fallocate(fd, 0, offset, size) != 0:
        code = ctypes.get_errno()
        if code in _NOT_SUPPORTED:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))

"""One file of tensors: its bytes mapped into memory without a copy, or read into memory of the caller."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from deepinfer_prep import fp8
from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.storage import FileState, RangeReader
from deepinfer_prep.runtime.loading.byte_layout import ByteRuns
from deepinfer_prep.runtime.loading.open_files import OpenFiles

_AHEAD_BYTES = 1024 * 1024

_MADV_POPULATE_READ = 22
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class TensorFile:
    """Reads tensors of one file of `size` bytes; all methods may be called from several threads at once.

    It holds no descriptor: `files` opens the file when something is read, and a file that took its place meanwhile is
    refused.
    """

    def __init__(self, path: Path, size: int, files: OpenFiles) -> None:
        self.place = path
        self._size, self._files = size, files
        self._state = FileState.of(path)
        self._mapping: ctypes.Array[ctypes.c_uint8] | None = None
        self._address = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file; what is mapped stays so as long as tensors refer to it."""
        self._files.drop(self.place)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; errors as `RangeReader.read_into`."""
        with self._opened() as reader:
            reader.read_into(buffer, offset)

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill buffers from consecutive bytes; errors as `RangeReader.read_scattered`."""
        with self._opened() as reader:
            reader.read_scattered(buffers, offset)

    def will_need(self, start: int, end: int) -> None:
        """Say that some bytes are read soon, so that the kernel fetches them meanwhile; only advice."""
        with self._opened() as reader:
            reader.will_need(start, end - start)

    def fetch(self, start: int, end: int) -> None:
        """Have the kernel fetch some bytes from storage, all at once and not waiting, unless they seem to be in memory.

        Reading alone asks for little more than it waits for. Advice about what is in memory costs a look at each page.
        """
        with self._opened() as reader:
            if not all(reader.is_in_memory(offset) for offset in (start, (start + end) // 2, end - 1)):
                reader.will_need(start, end - start)

    def view(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor over the file's own pages, with no byte read yet.

        Writing to it copies the page first: the file never changes. It stays valid after `close`, but not when
        something else cuts the file.
        """
        mapping = self._mapping or self._map(start, start + math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def populate(self, start: int, end: int) -> int:
        """Bring the pages of some bytes into memory, so that a view of them is used without waiting.

        Returns:
            Bytes of those pages.

        Raises:
            PrepError: the file was cut, or the storage reported an error.
        """
        self._map(start, end)
        self.fetch(start, end)
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        length = end - first
        read = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc.madvise(self._address + first, length, _MADV_POPULATE_READ) == 0:
            return read
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise PrepError(self._unreadable(start, end, os.strerror(code)))
        # Linux before 5.14 has no such advice: one byte of each page brings it in as well.
        np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(self._address + first))[:: mmap.PAGESIZE].max()
        return read

    def mapped_bytes(self, start: int, end: int) -> fp8.U8:
        """Some bytes of the file's own pages, to be read only."""
        self._map(start, end)
        pages = (ctypes.c_uint8 * (end - start)).from_address(self._address + start)
        return np.ctypeslib.as_array(pages)

    def read_runs(self, runs: ByteRuns, out: fp8.U8, scratch: fp8.U8) -> int:
        """Read runs of bytes, close together, into `out`.

        Args:
            out: `runs.nbytes` bytes.
            scratch: at least `runs.span` bytes where gaps are read with the runs.

        Returns:
            Bytes read, gaps included where they were.
        """
        with self._opened() as reader:
            if runs.count == 1:
                reader.read_into(out.data, runs.start)
            elif runs.is_read_whole:
                reader.read_into(scratch[: runs.span].data, runs.start)
                shape, strides = (runs.count, runs.run), (runs.stride, 1)
                np.copyto(out.reshape(shape), np.lib.stride_tricks.as_strided(scratch, shape, strides))
            else:
                _read_each(reader, runs, out)
        return runs.bytes_to_read

    def _map(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]:
        with self._lock:
            if self._mapping is None:
                with self._opened() as reader:
                    if reader.size() != self._size:
                        raise PrepError(self._unreadable(start, end, f"it has {reader.size():,} bytes now"))
                    self._mapping = reader.map_privately(self._size)
                self._address = ctypes.addressof(self._mapping)
            return self._mapping

    def _opened(self) -> AbstractContextManager[RangeReader]:
        return self._files.use(self.place, self._check)

    def _check(self, reader: RangeReader) -> None:
        """Compare what only another file or other bytes have; ctime also changes with a link or a mode.

        A file of another size fails where it is read, which says more.
        """
        now, then = reader.state(), self._state
        if now.inode != then.inode or (now.size == then.size and now.modified_ns != then.modified_ns):
            reason = "it was replaced or written to"
            raise PrepError(self._unreadable(0, self._size, reason), code="source-changed")

    def _unreadable(self, start: int, end: int, reason: str) -> str:
        return (
            f"{self.place}: bytes {start:,} to {end:,} cannot be read ({reason}): the file was changed while it was "
            "open, or its disk has a fault. `deepinfer-prep verify` tells what is wrong with the folder."
        )


def _read_each(reader: RangeReader, runs: ByteRuns, out: fp8.U8) -> None:
    at_once = max(1, _AHEAD_BYTES // runs.run)
    for first in range(0, runs.count, at_once):
        numbers = range(first, min(first + at_once, runs.count))
        # Told of all of them first, the kernel reads many at a time from storage; alone, each would wait.
        for number in numbers:
            reader.will_need(runs.start + number * runs.stride, runs.run)
        for number in numbers:
            run = out[number * runs.run : (number + 1) * runs.run]
            reader.read_into(run.data, runs.start + number * runs.stride)


def new_host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor to read into, in huge pages if it is large: filling it is twice as fast."""
    tensor = torch.empty(shape, dtype=dtype)
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length >= 4 * 1024 * 1024:
        # Only advice: where it is not taken, memory comes in small pages.
        _libc.madvise(first, length, _MADV_HUGEPAGE)
    return tensor

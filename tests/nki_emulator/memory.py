"""Storage: the bytes behind tensors, who wrote each of them, and how much of each memory is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from . import hardware, rules
from .context import current, refuse
from .dtypes import DType

Bytes = npt.NDArray[np.uint8]

UNWRITTEN = 0
MATMUL = 1
OTHER = 2
PROGRAM = 16
BOTH = 253
SHARED = 254
HOST = 255
"""Codes of a byte's writer. On chip: a matmul or anything else. In shared HBM: the host, PROGRAM + program index, BOTH
if the two cores wrote the same value, or SHARED once a barrier has made it visible to both cores."""


class Buffer(Enum):
    """A memory of the NeuronCore, or HBM."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def on_chip(self) -> bool:
        return self in (Buffer.sbuf, Buffer.psum)


@dataclass(frozen=True)
class ByteView:
    """An access pattern in bytes: `shape` elements of `itemsize` bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def over(self, flat: Bytes) -> Bytes:
        """The addressed bytes of `flat`, with a last dimension for the bytes of an element."""
        shape, strides = (*self.shape, self.itemsize), (*self.strides, 1)
        view: Bytes = np.ndarray(shape, np.uint8, buffer=flat, offset=self.offset, strides=strides)
        return view


class Marks:
    """Who wrote each byte of a storage. One number while that is the same everywhere, an array otherwise."""

    def __init__(self, size: int, code: int = UNWRITTEN) -> None:
        self._size = size
        self._uniform: int | None = code
        self._codes: Bytes | None = None

    def read(self, view: ByteView) -> tuple[int, ...]:
        """The distinct codes in `view`, in increasing order."""
        if self._uniform is not None:
            return (self._uniform,)
        assert self._codes is not None
        seen = view.over(self._codes)
        low, high = int(seen.min()), int(seen.max())
        if low == high:
            return (low,)
        return tuple(int(c) for c in np.unique(seen))

    def written_by_others(self, view: ByteView, mine: int) -> npt.NDArray[np.bool_] | None:
        """Which bytes of `view` another program wrote since the last barrier; None if none."""
        if all(code in (UNWRITTEN, mine, SHARED, HOST) for code in self.read(view)):
            return None
        seen = view.over(np.full(self._size, self._uniform, np.uint8) if self._codes is None else self._codes)
        others: npt.NDArray[np.bool_] = (seen >= PROGRAM) & (seen <= BOTH) & (seen != mine)
        return others

    def publish(self) -> None:
        """What any program wrote becomes SHARED."""
        if self._codes is not None:
            self._codes[self._codes >= PROGRAM] = SHARED
        elif self._uniform is not None and self._uniform >= PROGRAM:
            self._uniform = SHARED

    def write_both(self, view: ByteView, shared: npt.NDArray[np.bool_], mine: int) -> None:
        """Mark `view` as written by `mine`, and its bytes in `shared` by both programs."""
        if self._codes is None:
            self._codes = np.full(self._size, self._uniform, np.uint8)
            self._uniform = None
        view.over(self._codes)[...] = np.where(shared, BOTH, mine)

    def write(self, view: ByteView, code: int) -> None:
        """Mark `view` as written by `code`."""
        if self._uniform == code:
            return
        if math.prod(view.shape) * view.itemsize == self._size:
            self._uniform, self._codes = code, None
            return
        if self._codes is None:
            self._codes = np.full(self._size, self._uniform, np.uint8)
            self._uniform = None
        view.over(self._codes)[...] = code
        if self._codes[0] == code and self._codes[-1] == code and bool((self._codes == code).all()):
            self._uniform, self._codes = code, None


class Storage:
    """One allocation. On chip, dimension 0 of its shape is the partition; a partition's bytes are contiguous."""

    def __init__(
        self,
        buffer: Buffer,
        shape: tuple[int, ...],
        dtype: DType,
        *,
        writer: int = UNWRITTEN,
        data: Bytes | None = None,
    ) -> None:
        self.buffer = buffer
        self.shape = shape
        self.dtype = dtype
        self.size = math.prod(shape) * dtype.itemsize
        self.marks = Marks(self.size, writer)
        self.read_only = False
        self.dead = False
        self.name = ""
        self.data = data

    @property
    def row_bytes(self) -> int:
        """Bytes of one partition on chip; of everything in HBM."""
        return self.size // self.shape[0] if self.buffer.on_chip else self.size


class OnChipStorage(Storage):
    """A storage that occupies SBUF or PSUM until nothing refers to it any more."""

    def __init__(self, memory: Memory, buffer: Buffer, shape: tuple[int, ...], dtype: DType) -> None:
        super().__init__(buffer, shape, dtype)
        self._memory = memory
        self._taken = memory.take(buffer, self.row_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_taken"):
            self._memory.give_back(self.buffer, self._taken)


@dataclass
class Memory:
    """On-chip memory of one core in use now and at its peak: SBUF in bytes a partition, PSUM in banks."""

    sbuf: int = 0
    sbuf_peak: int = 0
    psum: int = 0
    psum_peak: int = 0

    def take(self, buffer: Buffer, row_bytes: int) -> int:
        """Account for an allocation and return what it took. Raises if the memory is full."""
        if buffer is Buffer.psum:
            banks = -(-row_bytes // hardware.PSUM_BANK_BYTES)
            if self.psum + banks > hardware.PSUM_BANKS:
                found = f"{banks} banks wanted, {hardware.PSUM_BANKS - self.psum} free"
                refuse(rules.PSUM_CAPACITY, "nl.ndarray", "", found)
            self.psum += banks
            self.psum_peak = max(self.psum_peak, self.psum)
            return banks
        size = -(-row_bytes // hardware.SBUF_ALIGN) * hardware.SBUF_ALIGN
        if self.sbuf + size > hardware.SBUF_BYTES_PER_PARTITION:
            free = hardware.SBUF_BYTES_PER_PARTITION - self.sbuf
            refuse(rules.SBUF_CAPACITY, "nl.ndarray", "", f"{size} bytes a partition wanted, {free} free")
        self.sbuf += size
        self.sbuf_peak = max(self.sbuf_peak, self.sbuf)
        return size

    def give_back(self, buffer: Buffer, amount: int) -> None:
        """Free what `take` returned."""
        if buffer is Buffer.psum:
            self.psum -= amount
        else:
            self.sbuf -= amount


def _shared(shape: tuple[int, ...], dtype: DType) -> Storage:
    program = current()
    index, storages = program.shared_allocated, program.shared.storages
    program.shared_allocated += 1
    if index == len(storages):
        storages.append(Storage(Buffer.shared_hbm, shape, dtype))
    storage = storages[index]
    if (storage.shape, storage.dtype) != (shape, dtype):
        found = f"{shape} {dtype} here, {storage.shape} {storage.dtype} in program 0 (shared allocation {index})"
        refuse(rules.SAME_STRUCTURE, "nl.ndarray", "", found)
    return storage


def allocate(buffer: Buffer, shape: tuple[int, ...], dtype: DType) -> Storage:
    """A new unwritten storage in the running program; a shared one may be another program's."""
    program = current()
    if buffer is Buffer.shared_hbm:
        storage = _shared(shape, dtype)
    elif buffer.on_chip:
        storage = OnChipStorage(program.memory, buffer, shape, dtype)
    else:
        storage = Storage(buffer, shape, dtype)
    if program.options.arithmetic and storage.data is None:
        storage.data = np.empty(storage.size, np.uint8)
    if program.scopes:
        program.scopes[-1].add(storage)
    return storage


def from_host(array: npt.NDArray[Any], dtype: DType) -> Storage:
    """A kernel argument: `array`'s bytes in HBM. What the kernel writes there shows in `array`, which must allow it."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    storage = Storage(Buffer.shared_hbm, array.shape, dtype, writer=HOST, data=data)
    storage.read_only = not (array.flags.c_contiguous and array.flags.writeable)
    return storage

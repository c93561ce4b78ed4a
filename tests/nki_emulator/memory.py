"""Storage: the bytes behind tensors, who wrote each of them, and how much of each memory is taken."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from . import hardware, rules
from .context import current, location, refuse
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


_numbers = itertools.count()


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
        self.number = next(_numbers)
        self.buffer = buffer
        self.shape = shape
        self.dtype = dtype
        self.size = math.prod(shape) * dtype.itemsize
        self.marks = Marks(self.size, writer)
        self.read_only = False
        self.dead = False
        self.name = ""
        self.lifetime: Lifetime | None = None
        self.data = data

    @property
    def row_bytes(self) -> int:
        """Bytes of one partition on chip; of everything in HBM."""
        return self.size // self.shape[0] if self.buffer.on_chip else self.size


@dataclass
class Lifetime:
    """How much of a memory a tensor takes, from the first instruction that touches it to the last."""

    buffer: Buffer
    amount: int
    location: str
    first: int = -1
    last: int = -1

    def touch(self, index: int) -> None:
        """Instruction number `index` uses the tensor."""
        self.first = index if self.first < 0 else min(self.first, index)
        self.last = max(self.last, index)


_CAPACITY = {Buffer.sbuf: hardware.SBUF_BYTES_PER_PARTITION, Buffer.psum: hardware.PSUM_BANKS}
_UNIT = {Buffer.sbuf: "bytes a partition", Buffer.psum: "banks"}
_RULES = {Buffer.sbuf: rules.SBUF_CAPACITY, Buffer.psum: rules.PSUM_CAPACITY}


@dataclass
class Memory:
    """On-chip memory of one core: SBUF in bytes a partition, PSUM in banks."""

    lifetimes: list[Lifetime] = field(default_factory=list)

    def take(self, buffer: Buffer, row_bytes: int) -> Lifetime:
        """The lifetime of a new tensor. Raises if it alone does not fit."""
        if buffer is Buffer.psum:
            amount = -(-row_bytes // hardware.PSUM_BANK_BYTES)
        else:
            amount = -(-row_bytes // hardware.SBUF_ALIGN) * hardware.SBUF_ALIGN
        lifetime = Lifetime(buffer, amount, location())
        if amount > _CAPACITY[buffer]:
            self._refuse(lifetime, amount)
        self.lifetimes.append(lifetime)
        return lifetime

    def peak(self, buffer: Buffer) -> int:
        """Most of `buffer` in use at once. Raises where that is more than there is, naming the tensor that was last."""
        used = [lifetime for lifetime in self.lifetimes if lifetime.buffer is buffer and lifetime.first >= 0]
        ends = sorted(used, key=lambda lifetime: lifetime.last)
        taken = peak = ended = 0
        for lifetime in sorted(used, key=lambda lifetime: lifetime.first):
            while ends[ended].last < lifetime.first:
                taken -= ends[ended].amount
                ended += 1
            taken += lifetime.amount
            peak = max(peak, taken)
            if taken > _CAPACITY[buffer]:
                self._refuse(lifetime, taken)
        return peak

    def _refuse(self, lifetime: Lifetime, taken: int) -> None:
        buffer = lifetime.buffer
        found = f"{taken} {_UNIT[buffer]} in use with this tensor's {lifetime.amount}, there are {_CAPACITY[buffer]}"
        refuse(_RULES[buffer], "nl.ndarray", "", found, lifetime.location)


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
    storage = _shared(shape, dtype) if buffer is Buffer.shared_hbm else Storage(buffer, shape, dtype)
    if buffer.on_chip and not any(program.loops):  # later trips of a loop use the tiles of the first
        storage.lifetime = program.memory.take(buffer, storage.row_bytes)
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

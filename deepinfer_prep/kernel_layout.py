"""The order in which a weight's bytes lie for kernels: k on partitions. Pure data and one permutation, no I/O.

TensorE contracts over partitions, so it wants a weight with its columns (k) there and rows (n) side by side, while
checkpoints store rows of k. In this layout the rows are cut into bands of at most 512, and inside its band a weight is
transposed: `[n / 512][row bytes][512]` bytes. A band keeps its offset and size in the file, and a weight its shape, so
only the order of bytes within a band differs from the stored one.

    byte (row, column) of the stored weight lies at
    band.first * row_bytes + column * band.rows + (row - band.first)

Why plain columns, and not tiles such as [k / 1024][128][8][512]: here the kernel decides how many consecutive columns
a partition takes. With 8 columns it reads those same tiles, in runs of 4 KiB a partition, and with 32 in runs of
16 KiB, where tiles of 128 columns would bind it to runs of 512 bytes (half the DMA rate in the cost model). The
columns of one partition lie within one 32-column block, so that a block's scale is one number a partition, which
VectorE and ScalarE apply at their full rate. And any range of columns is one contiguous run of each band, which is a
whole weight of this layout by itself: a rank that takes columns reads exactly its part and moves no byte.

Bands: two cores take half of the rows each, so the halves are cut separately where there are two (n % 256 == 0); no
band then belongs to both. The last band of a half (or of n) is shorter if it has to be.

fp4: two codes share a byte, of columns 2j (low nibble) and 2j + 1 (high). Both stay on one partition, and their bits
are arranged anew, signs before magnitudes, so that one shift and one mask make a code of each: with `t bbb` the high
nibble and `s aaa` the low one, the stored byte `t bbb s aaa` becomes `t s bbb aaa`. `(byte << 1) & 0x8E` is then the
low nibble's code as an e5m2 number (2^-14 of its value), and a signed shift right by one, masked with 0x9C, the high
nibble's as an e4m3 number (2^-6 of its value); the stored order takes VectorE twice the steps.

Scales of fp4 weights, one for each row and 32 columns, lie in the same bands: then a rank that takes columns reads
exactly its part of them as well. Kernels load scales row-major, so these are put back while they are read, a sixteenth
of their weight's bytes. Scales of fp8 blocks, a thousandth of theirs, stay in their stored order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import stringzilla

from deepinfer_prep.kernels.constants import BAND_ROWS, TWO_CORE_N_MULTIPLE
from deepinfer_prep.quantized import Element

Content = Element | Literal["e8m0"]
"""What the bytes of a tensor in bands stand for; e2m1 alone has its bits arranged anew."""

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

LAYOUT_NAME = "k_major_bands"
"""What a manifest calls this layout."""

LAYOUT_VERSION = 2
"""Counts changes of the order of bytes. 2: scales of fp4 weights lie in bands as well."""

_PAIR = 2
"""Columns transposed together on the way back, as one 16-bit element."""
_QUAD = 4
"""Columns transposed together on the way there, as one 32-bit element."""
_WIDE_TILE_BYTES = 2560
"""Columns that go there at once: less would hand Python's lock around more often, more need not be faster."""
_TILE_BYTES = 1024
"""Columns of a tile on the way back: 512 rows of them stay in a cache of half a megabyte."""
_MOST_TILES = 2
"""Tiles that one operation goes through on the way back: fewer would hand Python's lock around more often."""
_PADDING = 8
"""Bytes between rows that are read or written across: without, they would share a few sets of the cache."""


@dataclass(frozen=True, slots=True)
class Band:
    """Rows `first` to `first + rows` of a weight, whose bytes are permuted among themselves."""

    first: int
    rows: int

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.first + self.rows


def bands(n: int) -> tuple[Band, ...]:
    """The bands of a weight of n rows: at most 512 rows each, none across the middle if n is a multiple of 256."""
    part = n // 2 if n % TWO_CORE_N_MULTIPLE == 0 else n
    return tuple(
        Band(first, min(BAND_ROWS, start + part - first))
        for start in range(0, n, max(1, part))
        for first in range(start, start + part, BAND_ROWS)
    )


@dataclass(frozen=True, slots=True)
class BandSlice:
    """What a slice of a weight needs of one band: one contiguous run of bytes, and which rows of it.

    The run holds bytes `[columns, band.rows]`; rows `first_row` to `end_row` of the band belong to the slice. It is
    read whole even where only some rows do: theirs alone would be a short run for each column.
    """

    band: Band
    offset: int
    """Bytes from the start of the weight."""
    length: int
    columns: int
    """Byte columns: for fp4, half as many as columns of k."""
    first_row: int
    end_row: int


def slice_runs(n: int, row_bytes: int, rows: tuple[int, int], columns: tuple[int, int]) -> tuple[BandSlice, ...]:
    """The runs of bytes that hold rows `rows[0]:rows[1]` and byte columns `columns[0]:columns[1]`, a band each.

    With all rows, the runs one after the other are the slice in this layout already, and nothing else is read.
    """
    first_column, end_column = columns
    width = end_column - first_column
    return tuple(
        BandSlice(
            band,
            band.first * row_bytes + first_column * band.rows,
            width * band.rows,
            width,
            max(rows[0], band.first) - band.first,
            min(rows[1], band.end) - band.first,
        )
        for band in bands(n)
        if max(rows[0], band.first) < min(rows[1], band.end) and width > 0
    )


class Transposer:
    """Puts bands into the kernels' order and back, in memory that it keeps: new memory costs as much as the work.

    Tiles of columns go through it, a few columns as one element. Casts part and join them: they take 32 bytes an
    instruction, while a strided copy of bytes takes one.

    Args:
        memory: `MEMORY_BYTES` of it, aligned to 8 bytes; None for memory of its own.
    """

    _PADDED_BYTES = _MOST_TILES * BAND_ROWS * (_TILE_BYTES + _PADDING)
    _WIDE_BYTES = BAND_ROWS * (_WIDE_TILE_BYTES + _PADDING)
    MEMORY_BYTES = max(2 * _PADDED_BYTES + _MOST_TILES * BAND_ROWS * _TILE_BYTES, 2 * _WIDE_BYTES)

    def __init__(self, memory: U8 | None = None) -> None:
        memory = np.empty(self.MEMORY_BYTES, np.uint8) if memory is None else memory[: self.MEMORY_BYTES]
        padded = self._PADDED_BYTES
        self._tiles, self._columns, self._pairs = memory[:padded], memory[padded : 2 * padded], memory[2 * padded :]
        self._wide, self._quads = memory[: self._WIDE_BYTES], memory[self._WIDE_BYTES :]

    def to_kernel_order(self, stored: U8, out: U8, content: Content) -> None:
        """Transpose one band: stored bytes [rows, row bytes] into out [row bytes, rows], both contiguous.

        A cast keeps an element's lowest byte, and each of the four bytes of a quad is the lowest of the element that
        begins there: four casts part the quads.
        """
        rows, row_bytes = stored.shape
        whole = row_bytes - row_bytes % _QUAD
        for first in range(0, whole, _WIDE_TILE_BYTES):
            part = slice(first, min(first + _WIDE_TILE_BYTES, whole))
            width = part.stop - first
            tile = _padded(self._wide, rows, width)
            quads = self._quads[: rows * width].view(np.uint32).reshape(-1, rows)
            np.copyto(tile, stored[:, part])
            np.copyto(quads, tile.view(np.uint32).T)
            _recode(quads, content, _FP4_TO_KERNEL)
            parted = out[part].reshape(-1, _QUAD, rows)
            for byte in range(_QUAD):
                from_there = np.ndarray(quads.shape, quads.dtype, self._quads.data, offset=byte)
                np.copyto(parted[:, byte], from_there, casting="unsafe")
        np.copyto(out[whole:], stored[:, whole:].T)
        _recode(out[whole:], content, _FP4_TO_KERNEL)

    def to_stored_order(self, band: U8, out: U8, content: Content) -> None:
        """Undo `to_kernel_order`: a band's bytes [row bytes, rows] into out [rows, row bytes], both contiguous."""
        row_bytes, rows = band.shape
        for slab in _slabs(row_bytes):
            tiles, pairs = self._memory_of(slab, rows)
            part = slice(slab.first, slab.end)
            parted = band[part].reshape(slab.tiles, -1, _PAIR, rows)
            np.copyto(pairs, parted[:, :, 1])
            np.left_shift(pairs, 8, out=pairs)
            np.bitwise_or(pairs, parted[:, :, 0], out=pairs)
            _recode(pairs, content, _FP4_TO_STORED)
            columns = _padded(self._columns, slab.tiles * slab.width // _PAIR, _PAIR * rows).view(np.uint16)
            np.copyto(columns.reshape(pairs.shape), pairs)
            np.copyto(tiles.view(np.uint16), columns.reshape(pairs.shape).transpose(0, 2, 1))
            np.copyto(out[:, part].reshape(rows, slab.tiles, slab.width), tiles.transpose(1, 0, 2))
        if row_bytes % _PAIR:
            last = band[-1].copy()
            _recode(last, content, _FP4_TO_STORED)
            out[:, -1] = last

    def _memory_of(self, slab: _Slab, rows: int) -> tuple[U8, U16]:
        """Tiles [tiles, rows, columns] with padded rows, and their pairs [tiles, columns / 2, rows], contiguous."""
        tiles = _padded(self._tiles, slab.tiles * rows, slab.width).reshape(slab.tiles, rows, slab.width)
        pairs = self._pairs[: (slab.end - slab.first) * rows].view(np.uint16)
        return tiles, pairs.reshape(slab.tiles, -1, rows)


@dataclass(frozen=True, slots=True)
class _Slab:
    """Columns from `first` on: `tiles` tiles of `width` columns."""

    first: int
    tiles: int
    width: int

    @property
    def end(self) -> int:
        return self.first + self.tiles * self.width


@lru_cache(256)
def _slabs(row_bytes: int) -> tuple[_Slab, ...]:
    """Whole tiles, a few at a time, then what is left of whole pairs."""
    whole, left = divmod(row_bytes // _PAIR * _PAIR, _TILE_BYTES)
    found = [
        _Slab(first * _TILE_BYTES, min(_MOST_TILES, whole - first), _TILE_BYTES)
        for first in range(0, whole, _MOST_TILES)
    ]
    return (*found, _Slab(whole * _TILE_BYTES, 1, left)) if left else tuple(found)


def _padded(memory: U8, rows: int, size: int) -> U8:
    """Rows of `size` bytes in some memory, `_PADDING` bytes between them."""
    return memory[: rows * (size + _PADDING)].reshape(rows, -1)[:, :size]


def weight_to_kernel_order(stored: U8, content: Content) -> U8:
    """A whole weight, uint8 [n, row bytes], in this layout: the same shape, other bytes."""
    n, row_bytes = stored.shape
    out = np.empty_like(stored, order="C")
    transposer = Transposer()
    for band in bands(n):
        target = out[band.first : band.end].reshape(row_bytes, band.rows)
        transposer.to_kernel_order(np.ascontiguousarray(stored[band.first : band.end]), target, content)
    return out


def weight_to_stored_order(weight: U8, content: Content) -> U8:
    """Undo `weight_to_kernel_order`."""
    n, row_bytes = weight.shape
    out = np.empty_like(weight, order="C")
    transposer = Transposer()
    for band in bands(n):
        source = np.ascontiguousarray(weight[band.first : band.end]).reshape(row_bytes, band.rows)
        transposer.to_stored_order(source, out[band.first : band.end], content)
    return out


def fp4_byte(stored: int) -> int:
    """The kernel's byte of a stored pair of e2m1 codes: signs first, then the high nibble's magnitude."""
    return stored & 0x87 | (stored & 0x08) << 3 | (stored & 0x70) >> 1


_FP4_TO_KERNEL = bytes(fp4_byte(stored) for stored in range(256))
_FP4_TO_STORED = bytes(_FP4_TO_KERNEL.index(byte) for byte in range(256))


def _recode(codes: U8 | U16 | U32, content: Content, table: bytes) -> None:
    """Look every byte of contiguous fp4 codes up in a table."""
    if content == "e2m1":
        flat = codes.reshape(-1).view(np.uint8)
        stringzilla.translate(flat.data, table, out=flat)

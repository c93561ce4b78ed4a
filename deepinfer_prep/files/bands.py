"""A tensor in the kernels' order as bytes in a file: which of them belong to one band, and where each one came from."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from deepinfer_prep.kernel_layout import Band, Content, bands


@lru_cache(256)  # A model has few heights of weights, and every band of each of them is looked up.
def _bands_of(rows: int) -> tuple[Band, ...]:
    return bands(rows)


@dataclass(frozen=True, slots=True)
class BandedWeight:
    """A weight or its scale, or a stack of either, each of whose matrices has its rows cut into bands for itself.

    All offsets are in bytes from the first one. A band has the same place and size in either order.
    """

    shape: tuple[int, ...]
    """[rows, bytes of a row], or with a first axis of matrices."""
    content: Content

    @property
    def rows(self) -> int:
        """Of each matrix."""
        return self.shape[-2]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[-1]

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """The shape with rows and their bytes as one axis."""
        return (*self.shape[:-2], self.matrix_bytes)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix."""
        return self.rows * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return math.prod(self.shape)

    @property
    def bands(self) -> tuple[Band, ...]:
        """The bands of each matrix."""
        return _bands_of(self.rows)

    @property
    def largest_band_bytes(self) -> int:
        """Bytes of the largest band."""
        return max(band.rows for band in self.bands) * self.row_bytes

    def band_at(self, offset: int) -> tuple[int, Band]:
        """Where the band begins that holds the byte at `offset`, and the band."""
        matrix, inside = divmod(offset, self.matrix_bytes)
        row = inside // self.row_bytes
        band = self.bands[bisect_right(self.bands, row, key=lambda one: one.first) - 1]
        return matrix * self.matrix_bytes + band.first * self.row_bytes, band

    def bands_between(self, start: int, end: int, most: int) -> Iterator[tuple[int, Band]]:
        """The bands from the one that begins at `start` on that end by `end`, each with where it begins.

        They have at most `most` bytes together, or are one; there is none where no band begins at `start`.
        """
        first, band = self.band_at(start)
        last = min(end, start + max(most, band.rows * self.row_bytes))
        matrix = self.bands
        position, number = start, matrix.index(band)
        while first == start and position + (size := matrix[number].rows * self.row_bytes) <= last:
            yield position, matrix[number]
            position += size
            number = (number + 1) % len(matrix)

    def bands_in(self, rows: tuple[int, int], at: int = 0) -> tuple[Band, ...]:
        """The bands that some rows touch, as bands of a weight in which the first of these rows is row `at`."""
        first, last = rows
        inside = (band for band in self.bands if band.first < last and band.end > first)
        return tuple(Band(band.first - first + at, band.rows) for band in inside)

    def stored_offset(self, offset: int) -> int:
        """Where in the row-major weight the byte is that is at `offset` in the kernels' order."""
        start, band = self.band_at(offset)
        column, row = divmod(offset - start, band.rows)
        return start + row * self.row_bytes + column

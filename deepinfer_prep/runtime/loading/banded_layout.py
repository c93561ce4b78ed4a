"""Where the bytes of a part of a weight in the kernels' order lie in its file: one run for each band."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.kernel_layout import BandSlice, bands, slice_runs
from deepinfer_prep.runtime.loading.byte_layout import ByteRuns, FileLayout
from deepinfer_prep.runtime.loading.slices import Bounds, SliceError


@dataclass(frozen=True, slots=True)
class BandedLayout:
    """A weight, or a stack of weights, in the kernels' order in a file, from the byte `start` on.

    A part of it is a weight in that order itself where its rows are whole bands; `check` says so.
    """

    start: int
    weight: BandedWeight

    def check(self, bounds: Bounds, where: str) -> None:
        """Check that a part has the bands of a weight of its own.

        Raises:
            SliceError: it does not; the message begins with `where`.
        """
        first, last = bounds[-2]
        if self.weight.bands_in((first, last)) != bands(last - first):
            raise SliceError(
                f"{where}: rows {first} to {last} do not end where the bands of {self.weight.rows} rows do, so their "
                "bytes in the kernels' order are others. Read the weight under its own name, which gives it row-major."
            )

    def runs(self, bounds: Bounds) -> ByteRuns | None:
        """The bytes of a part; None where they have to be split first."""
        return self._as_rows.runs(bounds) if self._has_all_columns(bounds) else None

    def pieces(self, bounds: Bounds, limit: int) -> Iterator[tuple[ByteRuns, Bounds]]:
        """Cut a part of whole bands into pieces of at most `limit` bytes (or one row), in the file's order.

        The rows of a piece are those that it fills of a tensor of the part's shape that holds the kernels' order.
        """
        if self._has_all_columns(bounds):
            yield from self._as_rows.pieces(bounds, limit)
            return
        for matrix, start, one in self.slices(bounds):
            step = max(1, limit // one.columns)
            for row in range(0, one.band.rows, step):
                last = min(row + step, one.band.rows)
                size = (last - row) * one.columns
                rows = (one.band.first + row, one.band.first + last)
                yield ByteRuns(start + row * one.columns, size, 1, size), (*matrix, rows, bounds[-1])

    def slices(self, bounds: Bounds) -> Iterator[tuple[Bounds, int, BandSlice]]:
        """What a part needs of each band, in the file's order: bounds of the matrix, start of the run, the run."""
        of_one = slice_runs(self.weight.rows, self.weight.row_bytes, bounds[-2], bounds[-1])
        for matrix in range(*bounds[0]) if len(bounds) == 3 else (0,):
            for one in of_one:
                within: Bounds = ((matrix, matrix + 1),) if len(bounds) == 3 else ()
                yield within, self.start + matrix * self.weight.matrix_bytes + one.offset, one

    def _has_all_columns(self, bounds: Bounds) -> bool:
        return bounds[-1] == (0, self.weight.row_bytes)

    @property
    def _as_rows(self) -> FileLayout:
        """The same bytes as rows: whole bands are whole rows, whatever stands in them."""
        return FileLayout(self.start, self.weight.shape, 1)

"""Weights put into the kernels' order, band by band, while chunk after chunk of the output takes its part of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.storage import Reader
from deepinfer_prep.kernel_layout import Band, Transposer
from deepinfer_prep.planning.plan import Operation, OutputFile, Run

_TOGETHER_BYTES = 1024 * 1024
"""Smaller bands that follow each other are read together, at most so many bytes of them."""


class BandWriter:
    """Computes bytes of such weights in the order of the file; each band is read whole, and once.

    It holds two bands: one as it is read (or several small ones), and one in the kernels' order of which a chunk has
    taken a part.

    Args:
        file: whose bytes are computed.
        source: where they are read.
        look: is given each weight's bytes before they are halved, with their offset in the data section; of a band
            only what lies within `wanted`.
        wanted: start and end, in the data section, of all that is going to be asked for.
    """

    def __init__(
        self, file: OutputFile, source: Reader, look: Callable[[int, fp8.U8], None], wanted: tuple[int, int]
    ) -> None:
        self._file, self._source, self._look, self._wanted = file, source, look, wanted
        self._stored, self._ordered, self._transposer = _Memory(), _Memory(), Transposer()
        self._held: tuple[int, fp8.U8] = (-1, np.empty(0, np.uint8))
        """Where the band begins that was computed apart, and its bytes."""

    def copy_into(self, run: Run, weight: BandedWeight, start: int, out: fp8.U8) -> None:
        """Fill `out` with the bytes from `start` of the data section on, which all belong to `run`.

        Raises:
            PrepError, OSError: the source cannot be read.
        """
        position, end = start, start + out.size
        while position < end:
            bands = tuple(weight.bands_between(position - run.start, end - run.start, _TOGETHER_BYTES))
            if bands:
                size = sum(band.rows for _, band in bands) * weight.row_bytes
                self._compute(run, weight, bands, out[position - start :][:size])
            else:
                size = self._copy_part(run, weight, position, out[position - start :])
            position += size

    def _copy_part(self, run: Run, weight: BandedWeight, position: int, out: fp8.U8) -> int:
        """Copy what `out` has room for, from `position` on, of a band that belongs to several chunks."""
        start, band = weight.band_at(position - run.start)
        if run.start + start != self._held[0]:
            self._held = run.start + start, self._ordered.take(band.rows * weight.row_bytes)
            self._compute(run, weight, ((start, band),), self._held[1])
        part = self._held[1][position - self._held[0] :][: out.size]
        out[: part.size] = part
        return part.size

    def _compute(self, run: Run, weight: BandedWeight, bands: Sequence[tuple[int, Band]], out: fp8.U8) -> None:
        """Fill `out` with bands that follow each other."""
        low = run.start + bands[0][0]
        stored = self._stored.take(out.size)
        self._source.read_into(stored.data, self._file.source_start + low)
        if run.operation is Operation.HALVE:
            first, last = max(low, self._wanted[0]), min(low + out.size, self._wanted[1])
            self._look(first, stored[first - low : last - low])
            fp8.halve(stored, stored)
        for offset, band in bands:
            first = run.start + offset - low
            part = slice(first, first + band.rows * weight.row_bytes)
            ordered = out[part].reshape(weight.row_bytes, band.rows)
            self._transposer.to_kernel_order(stored[part].reshape(band.rows, -1), ordered, weight.content)


class _Memory:
    """Memory that is used again and again."""

    def __init__(self) -> None:
        self._all = np.empty(0, np.uint8)

    def take(self, size: int) -> fp8.U8:
        """So many bytes, of any content."""
        if self._all.size < size:
            self._all = np.empty(size, np.uint8)
        return self._all[:size]

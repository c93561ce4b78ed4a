"""Weights put into the kernels' order, band by band, while chunk after chunk of the output takes its part of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.storage import Reader
from deepinfer_prep.kernel_layout import to_kernel_order
from deepinfer_prep.planning.plan import Operation, OutputFile, Run


class BandWriter:
    """Computes bytes of such weights in the order of the file; each band is read whole, and once.

    It holds two bands: one as it is read, and one in the kernels' order of which a chunk has taken a part.

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
        self._stored, self._ordered = _Memory(), _Memory()
        self._held: tuple[int, fp8.U8] = (-1, np.empty(0, np.uint8))
        """Where the band begins that was computed apart, and its bytes."""

    def copy_into(self, run: Run, weight: BandedWeight, start: int, out: fp8.U8) -> None:
        """Fill `out` with the bytes from `start` of the data section on, which all belong to `run`.

        Raises:
            PrepError, OSError: the source cannot be read.
        """
        position, end = start, start + out.size
        while position < end:
            low, high = run.unit_at(position)
            part = out[position - start : min(high, end) - start]
            if part.size == high - low:
                self._compute(run, weight, low, part)
            else:
                if low != self._held[0]:
                    self._held = low, self._ordered.take(high - low)
                    self._compute(run, weight, *self._held)
                part[:] = self._held[1][position - low :][: part.size]
            position += part.size

    def _compute(self, run: Run, weight: BandedWeight, low: int, out: fp8.U8) -> None:
        """Fill `out` with the band that begins at `low`."""
        stored = self._stored.take(out.size)
        self._source.read_into(stored.data, self._file.source_start + low)
        if run.operation is Operation.HALVE:
            first, last = max(low, self._wanted[0]), min(low + out.size, self._wanted[1])
            self._look(first, stored[first - low : last - low])
            fp8.halve(stored, stored)
        to_kernel_order(stored.reshape(-1, weight.row_bytes), out.reshape(weight.row_bytes, -1), weight.element)


class _Memory:
    """Memory that is used again and again."""

    def __init__(self) -> None:
        self._all = np.empty(0, np.uint8)

    def take(self, size: int) -> fp8.U8:
        """So many bytes, of any content."""
        if self._all.size < size:
            self._all = np.empty(size, np.uint8)
        return self._all[:size]

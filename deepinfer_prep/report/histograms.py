"""Reads fp8 tensors and scales once and counts their codes: 256 exact counts a tensor, never a sample.

A tensor is read in segments by the threads of `workers`, and its counts are handed out when its last segment
is counted, so memory holds the counts of the tensors under way and not those of the whole checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.files import segments
from deepinfer_prep.files.container import Location
from deepinfer_prep.files.storage import Readers
from deepinfer_prep.quantized import FLOAT_DTYPES, element_bytes
from deepinfer_prep.report.byte_counts import I64, count_each_code
from deepinfer_prep.workers import Meter, ProgressCallback, batches, run_parallel

_BATCH_PIECES = 256


LOWEST_EXPONENT = -1074
"""That of the smallest float64."""
_EXPONENTS = 1024 - LOWEST_EXPONENT


def _no_exponents() -> I64:
    return np.zeros(_EXPONENTS, dtype=np.int64)


@dataclass(slots=True)
class ScaleCounts:
    """How the values of a scale tensor are spread."""

    exponents: I64 = field(default_factory=_no_exponents)
    """How many positive finite values have floor(log2(value)) = `LOWEST_EXPONENT` + position."""
    other: int = 0
    """Values that are zero, negative, infinite or NaN."""
    all_powers: bool = True
    """Whether every value is a positive power of two."""

    def add(self, more: ScaleCounts) -> None:
        """Add the counts of other values."""
        self.exponents += more.exponents
        self.other += more.other
        self.all_powers = self.all_powers and more.all_powers

    def by_exponent(self) -> dict[int, int]:
        """The exponents that occur, in their order -> how many values have each."""
        found = np.flatnonzero(self.exponents)
        return dict(zip((found + LOWEST_EXPONENT).tolist(), self.exponents[found].tolist(), strict=True))


def count_scales(values: fp8.U8, dtype: str) -> ScaleCounts:
    """Count the binary exponents of scale values.

    Args:
        values: raw little-endian bytes of whole elements, contiguous.
        dtype: "F64", "F32", "F16" or "BF16"; every other name stands for e8m0 bytes (2^(byte - 127)).
    """
    result = ScaleCounts()
    if dtype not in FLOAT_DTYPES:
        counts = count_each_code(values)
        result.exponents[-127 - LOWEST_EXPONENT : 128 - LOWEST_EXPONENT] = counts[:255]
        result.other = int(counts[255])
        result.all_powers = not result.other
        return result
    floats = fp8.widen(values, dtype).astype(np.float64)
    usable = floats[np.isfinite(floats) & (floats > 0)]
    mantissa, exponent = np.frexp(usable)
    # frexp gives a mantissa in [0.5, 1), so its exponent is one above floor(log2(value)).
    result.exponents += np.bincount(exponent - 1 - LOWEST_EXPONENT, minlength=_EXPONENTS)
    result.other = floats.size - usable.size
    result.all_powers = not result.other and bool((mantissa == 0.5).all())
    return result


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """What one tensor holds: `codes` (int64 of shape [256]) of an fp8 tensor, `scales` of a scale."""

    name: str
    codes: I64 | None = None
    scales: ScaleCounts | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes start..end of a tensor, whole elements."""

    location: Location
    is_scale: bool
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def count_tensors(
    fp8_tensors: Iterable[Location],
    scales: Iterable[Location],
    workers: int,
    chunk_size: int,
    progress: ProgressCallback | None = None,
) -> Generator[TensorCounts, None, None]:
    """Read tensors once, in the order of their files, and yield the counts of each as soon as they are complete.

    Raises:
        PrepError, OSError: a file cannot be read.
    """
    tensors = [(location, False) for location in fp8_tensors] + [(location, True) for location in scales]
    tensors.sort(key=lambda item: (str(item[0].path), item[0].tensor.start))
    pieces = [piece for location, is_scale in tensors for piece in _pieces(location, is_scale)]
    meter = Meter(progress, "read fp8", sum(piece.nbytes for piece in pieces))
    left = Counter(piece.location.tensor.name for piece in pieces)
    sums: dict[str, I64 | ScaleCounts] = {}
    batched = batches(pieces, lambda piece: piece.nbytes, segments.SEGMENT_BYTES, _BATCH_PIECES)
    for found in run_parallel(batched, _count_batch, workers, chunk_size):
        meter.add(sum(piece.nbytes for piece, _ in found))
        for piece, counts in found:
            name = piece.location.tensor.name
            _add(sums, name, counts)
            left[name] -= 1
            if not left[name]:
                yield _complete(name, sums.pop(name))


def _pieces(location: Location, is_scale: bool) -> Iterator[_Piece]:
    size = location.tensor.nbytes
    for start in range(0, max(size, 1), segments.SEGMENT_BYTES):
        yield _Piece(location, is_scale, start, min(start + segments.SEGMENT_BYTES, size))


def _add(sums: dict[str, I64 | ScaleCounts], name: str, counts: I64 | ScaleCounts) -> None:
    so_far = sums.get(name)
    if isinstance(so_far, ScaleCounts) and isinstance(counts, ScaleCounts):
        so_far.add(counts)
    elif isinstance(so_far, np.ndarray) and isinstance(counts, np.ndarray):
        so_far += counts
    else:
        sums[name] = counts


def _complete(name: str, counts: I64 | ScaleCounts) -> TensorCounts:
    return TensorCounts(name, scales=counts) if isinstance(counts, ScaleCounts) else TensorCounts(name, counts)


def _count_batch(batch: list[_Piece], buffer: fp8.U8) -> list[tuple[_Piece, I64 | ScaleCounts]]:
    with closing(Readers()) as readers:
        return [(piece, _count_piece(piece, readers, buffer)) for piece in batch]


def _count_piece(piece: _Piece, readers: Readers, buffer: fp8.U8) -> I64 | ScaleCounts:
    dtype = piece.location.tensor.dtype
    if piece.is_scale:
        scales = ScaleCounts()
        for chunk in _chunks(piece, readers, buffer):
            scales.add(count_scales(chunk, dtype))
        return scales
    codes = np.zeros(256, dtype=np.int64)
    for chunk in _chunks(piece, readers, buffer):
        codes += count_each_code(chunk)
    return codes


def _chunks(piece: _Piece, readers: Readers, buffer: fp8.U8) -> Iterator[fp8.U8]:
    item = element_bytes(piece.location.tensor.dtype)
    step = buffer.size // item * item
    reader, base = readers.get(piece.location.path), piece.location.data_start + piece.location.tensor.start
    for start in range(piece.start, piece.end, step):
        chunk = buffer[: min(step, piece.end - start)]
        reader.read_into(chunk.data, base + start)
        yield chunk

"""The source values of a sample: pseudo-random, heavy-tailed, the same for a seed however they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .table import Entry

Floats = npt.NDArray[np.float32]

SPREAD = 0.02
"""Standard deviation of a weight before its row's factor."""

OUTLIER_FACTOR = 16.0
OUTLIERS = 64
"""Of 65,536 equally likely quantiles, this many are outliers: about one value in each 32x32 block."""

_BLOCK_VALUES = 1 << 17


def row_blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Row ranges of about 131,000 values, in whole 32-row blocks: the units of generation."""
    rows, columns = entry.matrix
    step = max(32, _BLOCK_VALUES // max(1, columns) // 32 * 32)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def block_values(entry: Entry, seed: int, start: int, stop: int) -> Floats:
    """Source values of one range of `row_blocks`: float32 [stop - start, columns], a buffer of the caller's own.

    Normal quantiles, some of them outliers, times a factor of 1/4 to 4 for each row, plus the entry's center.
    """
    columns = entry.matrix[1]
    name = int.from_bytes(hashlib.blake2b(entry.name.encode(), digest_size=8).digest(), "little")
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, name, start))))
    count = (stop - start) * columns
    draws = generator.integers(0, 1 << 64, size=-(-count // 4), dtype=np.uint64).view(np.uint16)[:count]
    factors = np.exp2(generator.uniform(-2, 2, size=(stop - start, 1))).astype(np.float32)
    values = _quantiles().take(draws).reshape(stop - start, columns)
    values *= factors
    if entry.center:
        values += np.float32(entry.center)
    return values


def source_values(entry: Entry, seed: int) -> Floats:
    """All source values of a tensor before quantization or rounding: float32 [rows, columns] of `entry.matrix`."""
    blocks = [block_values(entry, seed, start, stop) for start, stop in row_blocks(entry)]
    return np.concatenate(blocks) if blocks else np.zeros(entry.matrix, np.float32)


@cache
def _quantiles() -> Floats:
    """65,536 equally likely values of a normal distribution of standard deviation `SPREAD`, some of them outliers."""
    normal = NormalDist(0.0, SPREAD)
    values = np.array([normal.inv_cdf((code + 0.5) / 65536) for code in range(65536)])
    values[:: 65536 // OUTLIERS] *= OUTLIER_FACTOR
    return values.astype(np.float32)

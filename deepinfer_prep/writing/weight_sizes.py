"""How large the values of weights are that unusual scales give, from a bounded sample of their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import numpy.typing as npt

from deepinfer_prep import fp8
from deepinfer_prep.files.container import read_stored
from deepinfer_prep.files.storage import Readers
from deepinfer_prep.planning.plan import Plan
from deepinfer_prep.quantized import element_bytes
from deepinfer_prep.writing.scale_values import WeightSize, read_values

_MOST_WEIGHTS = 64
_PIECES = 3
_PIECE_BYTES = 64 * 1024
_NAN = 0x7F
_VALUES = np.array([fp8.decode_e4m3fn(code) for code in range(_NAN)])
_FEWEST_CODES = 24
"""A trained weight has most of the 126 codes that are not zero, sign aside; one value a matrix says nothing."""


def sample_sizes(plan: Plan, scales: Sequence[str]) -> Iterator[WeightSize]:
    """The sizes of weights with these scales, one for a scale and for 64 scales at most.

    Of each tensor up to three pieces of 64 KiB are read.

    Raises:
        PrepError, OSError: a file cannot be read.
    """
    weights = _weights_of(plan, frozenset(scales[:_MOST_WEIGHTS]))
    with closing(Readers()) as readers:
        for scale in scales[:_MOST_WEIGHTS]:
            counts = np.bincount(_sample(plan, weights[scale], readers) & 0x7F, minlength=128)[:_NAN]
            values = read_values(_sample(plan, scale, readers), plan.checkpoint.tensors[scale].dtype)
            finite = values[np.isfinite(values)]
            middle_scale = float(np.median(finite)) if finite.size else 0.0
            yield WeightSize(
                plan.checkpoint.where(weights[scale]),
                scale,
                middle_scale,
                _middle(counts) * middle_scale,
                float(_VALUES[: np.flatnonzero(counts)[-1] + 1].max()) if counts.any() else 0.0,
            )


def _middle(counts: npt.NDArray[np.int64]) -> float:
    """The median of the values of codes that are not zero, from how often each was read; 0 where they say nothing."""
    above = counts[1:]
    if np.count_nonzero(above) < _FEWEST_CODES:
        return 0.0
    return float(_VALUES[1 + np.searchsorted(np.cumsum(above), above.sum() / 2)])


def _weights_of(plan: Plan, scales: frozenset[str]) -> dict[str, str]:
    """The first weight of each of these scales."""
    found: dict[str, str] = {}
    if scales:
        for weight in plan.weights:
            if weight.quantized.scale in scales:
                found.setdefault(weight.quantized.scale, weight.quantized.weight)
    return found


def _sample(plan: Plan, name: str, readers: Readers) -> fp8.U8:
    """Bytes of a tensor from its begin, its middle and its end, whole elements of it."""
    location = plan.checkpoint.location(name)
    tensor = location.tensor
    size, item = min(_PIECE_BYTES, tensor.nbytes), element_bytes(tensor.dtype)
    starts = {(tensor.nbytes - size) * piece // (_PIECES - 1) // item * item for piece in range(_PIECES)}
    return np.concatenate([read_stored(location, start, start + size, readers) for start in sorted(starts)])

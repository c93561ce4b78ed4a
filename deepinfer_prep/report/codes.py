"""What follows exactly from the 256 counts of an fp8 tensor's codes.

Three ways to bring e4m3fn values (largest 448) into the hardware's e4m3 (largest 240) are compared. Halving is
what this tool does. The recipe multiplies by 240/448 in bf16, rounds to fp8 and multiplies the scale by 448/240.
Clipping replaces everything beyond 240 by 240. A signal-to-noise ratio is 10 log10 of the sum of the squared
values over the sum of the squared changes, in decibels, in units of the codes: scales multiply both alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer_prep import fp8
from deepinfer_prep.report.byte_counts import I64

F64 = npt.NDArray[np.float64]

_VALUES: F64 = fp8.DECODE_E4M3FN.astype(np.float64)
_FINITE = ~np.isnan(_VALUES)
_FINITE_VALUES: F64 = np.where(_FINITE, _VALUES, 0.0)
_ABOVE, _ROUNDED, _NAN = list(fp8.ABOVE_240_CODES), list(fp8.ROUNDED_CODES), list(fp8.NAN_CODES)
_HALVED_FROM_ABOVE = [fp8.HALVE[code] for code in _ABOVE]
_ROUNDING_CHANGE = 2.0**-9
"""By how much halving and doubling again change a value that is rounded: one step of the smallest magnitudes."""


def _after_halving() -> F64:
    return 2 * _FINITE_VALUES[list(fp8.HALVE)]


def _after_recipe() -> F64:
    scaled = (_FINITE_VALUES.astype(np.float32) * np.float32(240 / 448)).astype(np.float32)
    hi, _ = fp8.split_hi_lo(scaled)
    in_bf16 = (hi.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return _nearest_e4m3fn(in_bf16) * (448 / 240)


def _after_clipping() -> F64:
    clipped: F64 = np.clip(_FINITE_VALUES, -240, 240)
    return clipped


def _nearest_e4m3fn(values: F64) -> F64:
    """Round magnitudes of at most 448 to e4m3fn, ties to even."""
    _, exponent = np.frexp(values)
    step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    rounded: F64 = np.rint(values / step) * step
    return rounded


_AFTER = {"halving": _after_halving(), "recipe": _after_recipe(), "clipping": _after_clipping()}
_SQUARES = _FINITE_VALUES**2
_SQUARED_CHANGES = {way: (after - _FINITE_VALUES) ** 2 for way, after in _AFTER.items()}
_CHANGED = {way: (after != _FINITE_VALUES) & _FINITE for way, after in _AFTER.items()}


@dataclass(frozen=True, slots=True)
class Ways:
    """One figure for each way to bring the values into the hardware's range."""

    halving: float | None
    recipe: float | None
    clipping: float | None


@dataclass(frozen=True, slots=True)
class CodeFigures:
    """What the codes of one fp8 tensor, or of several together, amount to."""

    codes: int
    above_240: int
    """Finite stored codes beyond 240, which the hardware reads as infinity or NaN."""
    nan: int
    brought_into_range: int | None
    """In an output: codes that stood beyond 240 in the source; they are known from their halves. None elsewhere."""
    rounded: int | None
    """Codes whose half is not representable; None where only the halves are known."""
    changed: Ways | None
    """How many codes come out with another value; None where only the halves are known."""
    decibels: Ways | None
    """Signal-to-noise ratios; one is None where no value changes. None where only the halves are known."""


def source_figures(counts: I64) -> CodeFigures:
    """Figures of codes as a checkpoint stores them; `counts` is int64 of shape [256]."""
    exact = counts.astype(object)
    return CodeFigures(
        codes=int(counts.sum()),
        above_240=int(counts[_ABOVE].sum()),
        nan=int(counts[_NAN].sum()),
        brought_into_range=None,
        rounded=int(counts[_ROUNDED].sum()),
        changed=Ways(**{way: int(exact[changed].sum()) for way, changed in _CHANGED.items()}),
        decibels=Ways(**{way: _decibels(counts, changes) for way, changes in _SQUARED_CHANGES.items()}),
    )


def halved_figures(counts: I64) -> CodeFigures:
    """Figures of codes that were halved already; `counts` is int64 of shape [256].

    The codes 0x70 to 0x76 and their negatives are the halves of those beyond 240 and of no others. Which codes
    were rounded cannot be told from their halves.
    """
    return CodeFigures(
        codes=int(counts.sum()),
        above_240=int(counts[_ABOVE].sum()),
        nan=int(counts[_NAN].sum()),
        brought_into_range=int(counts[_HALVED_FROM_ABOVE].sum()),
        rounded=None,
        changed=None,
        decibels=None,
    )


def halving_decibels(halved: I64, rounded: int) -> float | None:
    """The signal-to-noise ratio of a halving that rounded so many codes, from the counts of the halved codes.

    Each rounded code changes by exactly 2^-9, so the noise is exact; the signal is that of the result.
    """
    signal = float(4 * (halved * _SQUARES).sum())
    noise = rounded * _ROUNDING_CHANGE**2
    return 10 * math.log10(signal / noise) if signal and noise else None


def _decibels(counts: I64, squared_changes: F64) -> float | None:
    signal, noise = float((counts * _SQUARES).sum()), float((counts * squared_changes).sum())
    return 10 * math.log10(signal / noise) if noise else None

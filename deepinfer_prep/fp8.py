"""The arithmetic of the conversion: pure functions on bytes and numpy arrays, no I/O.

Formats (OCP 8-bit floating point specification 1.0, OCP microscaling specification 1.0):

* e4m3fn: bias 7, largest finite 448 (code 0x7E), NaN 0x7F and 0xFF, no infinity. What checkpoints hold.
* e4m3: the same layout read the IEEE way, largest finite 240 (0x77); exponent field 15 is infinity or
  NaN. What Trainium2 computes with. The two read 14 codes differently: 0x78..0x7E and their negatives.
* e8m0: the value 2^(byte - 127); 255 is NaN. There is no zero and no sign.

Halving every e4m3fn code and doubling its scale keeps the product and leaves no code above 0x76 (224).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import stringzilla

from deepinfer_prep.quantized import FLOAT_DTYPES

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]

FP8_MAX = 224
"""Largest magnitude that a halved weight holds: 448 / 2, inside the hardware's 240."""

NAN_CODES = (0x7F, 0xFF)
ABOVE_240_CODES = tuple(range(0x78, 0x7F)) + tuple(range(0xF8, 0xFF))
"""Finite e4m3fn codes (256..448) that the hardware's e4m3 reads as infinity or NaN."""
ROUNDED_CODES = tuple(range(0x01, 0x10, 2)) + tuple(range(0x81, 0x90, 2))
"""The 16 odd codes below 2^-5 whose half lies between two codes; everything else halves exactly."""

# Table look-ups go through pieces that stay in the second-level cache: about 2.5 times faster than one
# pass over a chunk of several megabytes.
PIECE_BYTES = 256 * 1024
_COUNTED_BYTES = PIECE_BYTES // 2
"""Counting holds three arrays of this size."""


def decode_e4m3fn(code: int) -> float:
    """The value of one e4m3fn code, exact; NaN for 0x7F and 0xFF."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def _halve_code(code: int) -> int:
    """e4m3fn(value / 2), round to nearest even; NaN stays NaN and -0 stays -0."""
    sign, magnitude = code & 0x80, code & 0x7F
    if magnitude == 0x7F:
        return code
    if magnitude >= 0x10:
        return sign | (magnitude - 0x08)
    # Subnormals and the lowest normal binade are integers in units of 2^-9; Python rounds to even.
    return sign | round(magnitude / 2)


HALVE = bytes(_halve_code(code) for code in range(256))
"""Table: e4m3fn code -> code of half its value."""

DOUBLE_E8M0 = bytes(min(code + 1, 255) for code in range(256))
"""Table: e8m0 byte -> byte of twice its value. 254 and 255 have none and must be refused beforehand."""

DECODE_E4M3FN: F32 = np.array([decode_e4m3fn(code) for code in range(256)], dtype=np.float32)
"""Table: e4m3fn code -> float32 value, exact."""


@dataclass(frozen=True, slots=True)
class CodeCounts:
    """How many e4m3fn codes of each noteworthy class some bytes hold, counted before halving."""

    rounded: int = 0
    """Codes whose half is not representable (`ROUNDED_CODES`)."""
    nan: int = 0
    """NaN codes; halving keeps them."""
    above_240: int = 0
    """Finite codes above 240, which the hardware would read as infinity or NaN."""

    def __add__(self, other: CodeCounts) -> CodeCounts:
        return CodeCounts(self.rounded + other.rounded, self.nan + other.nan, self.above_240 + other.above_240)


class NoExactResultError(ArithmeticError):
    """An operation has no exact finite result for one element.

    `index` is the element's position in the array that was passed, `problem` a sentence part about its value.
    """

    def __init__(self, index: int, problem: str) -> None:
        self.index = index
        self.problem = problem
        super().__init__(f"element {index} {problem}")


def halve(codes: U8, out: U8) -> None:
    """Write the half of every e4m3fn code of `codes` to `out` (same length, contiguous; may be `codes`)."""
    _translate(codes, HALVE, out)


def double(values: U8, dtype: str, out: U8) -> None:
    """Write twice every element of `values` to `out`; exact, subnormals included.

    Args:
        values: raw little-endian bytes of whole elements, contiguous.
        dtype: "F64", "F32", "F16" or "BF16"; every other name stands for e8m0 bytes.
        out: as long as `values`, contiguous; may be `values`.

    Raises:
        NoExactResultError: an element is NaN or infinite, or has no finite double; `out` is then unspecified.
    """
    if dtype in FLOAT_DTYPES:
        _double_floats(values, dtype, out)
    else:
        _double_exponents(values, out)


def _double_exponents(codes: U8, out: U8) -> None:
    if codes.size and int(codes.max()) >= 254:
        index = int(np.argmax(codes >= 254))
        found = "255 (NaN)" if codes[index] == 255 else "254 (2^127)"
        raise NoExactResultError(index, f"is the e8m0 byte {found}, which has no double")
    _translate(codes, DOUBLE_E8M0, out)


def _double_floats(values: U8, dtype: str, out: U8) -> None:
    floats = widen(values, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        doubled = floats + floats
    if not np.isfinite(doubled).all():
        index = int(np.argmin(np.isfinite(doubled)))
        raise NoExactResultError(index, f"is {float(floats[index])!r}, which has no finite {dtype} double")
    if dtype == "BF16":
        out.view(np.uint16)[:] = (doubled.view(np.uint32) >> 16).astype(np.uint16)
    else:
        out.view(doubled.dtype)[:] = doubled


def widen(values: U8, dtype: str) -> npt.NDArray[np.floating]:
    """Raw bytes of F64, F32, F16 or BF16 elements as a numpy float array (BF16 as float32, exact)."""
    if dtype == "BF16":
        return (values.view("<u2").astype(np.uint32) << 16).view(np.float32)
    result: npt.NDArray[np.floating] = values.view({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])
    return result


def count_codes(codes: U8) -> CodeCounts:
    """Count the noteworthy e4m3fn codes of a contiguous array."""
    size = min(codes.size, _COUNTED_BYTES)
    bits, found = np.empty(size, np.uint8), np.empty(size, np.bool_)
    rounded = nan = high = 0
    for start in range(0, codes.size, _COUNTED_BYTES):
        piece = codes[start : start + _COUNTED_BYTES]
        masked, marks = bits[: piece.size], found[: piece.size]
        np.bitwise_and(piece, 0x7F, out=masked)
        high_here = _sum(np.greater_equal(masked, ABOVE_240_CODES[0], out=marks))
        high += high_here
        if high_here:
            nan += _sum(np.equal(masked, NAN_CODES[0], out=marks))
        # What is rounded is odd and has none of the three upper bits of the exponent.
        np.bitwise_and(piece, 0x71, out=masked)
        rounded += _sum(np.equal(masked, 0x01, out=marks))
    return CodeCounts(rounded, nan, high - nan)


def _sum(marks: npt.NDArray[np.bool_]) -> int:
    return int(stringzilla.bytesum(marks.data))


def has_high_codes(codes: U8) -> bool:
    """Whether any e4m3fn code of a contiguous array lies above 240 or is NaN; a fast test for halved weights."""
    for start in range(0, codes.size, PIECE_BYTES):
        piece = codes[start : start + PIECE_BYTES]
        # As signed bytes the negative codes lie below zero, as unsigned bytes above the positive ones.
        if int(piece.view(np.int8).max()) > 0x77 or int(piece.max()) > 0xF7:
            return True
    return False


def split_hi_lo(values: F32) -> tuple[U16, U16]:
    """Split fp32 values into bf16 halves: hi = bf16(x), lo = bf16(x - hi).

    |x - hi - lo| <= max(2^-17 |x|, 2^-134); the second term is half of bf16's smallest subnormal.

    Args:
        values: float32, any shape.

    Returns:
        The bit patterns of hi and lo as uint16 arrays of the same shape.

    Raises:
        NoExactResultError: a value is not finite, or rounds to infinity in bf16 (|x| >= 0x1.ffp127).
    """
    hi = _round_to_bf16(values)
    finite = (hi & 0x7F80) != 0x7F80
    if not finite.all():
        index = int(np.argmin(finite))
        raise NoExactResultError(index, f"is {float(values.ravel()[index])!r}, which is not finite in bf16")
    lo = values - (hi.astype(np.uint32) << 16).view(np.float32)
    return hi, _round_to_bf16(lo)


def _round_to_bf16(values: F32) -> U16:
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest_even = np.uint32(0x7FFF) + ((bits >> 16) & 1)
    # A NaN may wrap around here, but split_hi_lo has to see it as non-finite.
    rounded = np.where(np.isnan(values), bits | np.uint32(0x400000), bits + nearest_even)
    halves: U16 = (rounded >> 16).astype(np.uint16)
    return halves


def _translate(source: U8, table: bytes, out: U8) -> None:
    for start in range(0, source.size, PIECE_BYTES):
        stop = start + PIECE_BYTES
        stringzilla.translate(source[start:stop].data, table, out=out[start:stop])

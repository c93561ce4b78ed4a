"""Block quantization to e4m3fn, e2m1 and e8m0 in NumPy alone, one rounding for each value."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from .table import Element

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The eight magnitudes of e2m1 in code order (OCP Microscaling Formats 1.0); bit 3 is the sign."""

LEAST_AMAX = 1e-4
"""A block of smaller values is scaled as if this were its largest magnitude, so that no scale underflows."""


def e4m3_values() -> npt.NDArray[np.float64]:
    """The 128 non-negative e4m3fn values in code order; code 0x7F is NaN (OCP 8-bit Floating Point 1.0)."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[127] = np.nan
    return values


def encode_e4m3(values: Floats) -> Bytes:
    """float32 -> e4m3fn codes, to nearest, ties to even; 464 and above, infinities and NaN become NaN."""
    return _e4m3_codes().take(_rounded_to_odd(values))


def encode_e2m1(values: Floats) -> Bytes:
    """float32 [n, k] -> packed e2m1 [n, k/2]: column 2j in the low four bits of byte j. Magnitudes above 6 become 6."""
    codes = _e2m1_codes().take(_rounded_to_odd(values))
    pairs = codes.view(np.uint16)
    return (pairs | pairs >> 4).astype(np.uint8)


def encode_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """float32 -> bfloat16 bits, to nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def block_amax(values: Floats, block_rows: int) -> Floats:
    """Largest magnitude of each `block_rows` x 32 block: [n, k] -> [ceil(n / block_rows), ceil(k / 32)]."""
    rows, columns = values.shape
    magnitudes = np.abs(values)
    if rows % block_rows or columns % 32:
        magnitudes = np.pad(magnitudes, ((0, -rows % block_rows), (0, -columns % 32)))
    if block_rows > 1:
        magnitudes = magnitudes.reshape(-1, block_rows, magnitudes.shape[1]).max(axis=1)
    amax = magnitudes.reshape(-1, 32)
    while amax.shape[1] > 1:  # in halves: ten times as fast as a reduction over so short an axis
        amax = np.maximum(amax[:, 0::2], amax[:, 1::2])
    return amax.reshape(len(magnitudes), -1)


def power_of_two_scale(amax: Floats, largest: float) -> tuple[Bytes, Floats]:
    """The smallest power of two that brings `amax` to `largest` or below: its e8m0 byte and its reciprocal."""
    mantissa, exponent = np.frexp(np.maximum(amax, np.float32(LEAST_AMAX)).astype(np.float64) / largest)
    exponent -= mantissa == 0.5
    return (exponent + 127).astype(np.uint8), np.ldexp(np.float32(1), -exponent).astype(np.float32)


def quantize(values: Floats, block_rows: int, element: Element) -> tuple[Bytes, Bytes]:
    """Values [n, k] -> codes (e4m3 [n, k] or packed e2m1 [n, k/2]) and e8m0 scales [ceil(n/block_rows), ceil(k/32)].

    `values` is overwritten: callers pass a buffer of their own.
    """
    largest = E4M3_MAX if element == "e4m3" else E2M1_MAX
    scale, reciprocal = power_of_two_scale(block_amax(values, block_rows), largest)
    rows, columns = values.shape
    if block_rows > 1:
        reciprocal = np.repeat(reciprocal, block_rows, axis=0)[:rows]
    if columns % 32 == 0:
        blocks = values.reshape(rows, -1, 32)
        blocks *= reciprocal[:, :, None]
    else:
        values *= np.repeat(reciprocal, 32, axis=1)[:, :columns]
    return (encode_e4m3 if element == "e4m3" else encode_e2m1)(values), scale


def _rounded_to_odd(values: Floats) -> npt.NDArray[np.uint32]:
    """The upper half of each float32 with its last bit set if any lower bit is: exact input for a second rounding.

    Eight significant bits remain and neither target has more than four, so a value between two upper halves
    is never mistaken for a tie (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd: npt.NDArray[np.uint32] = bits & np.uint32(0xFFFF)
    odd += np.uint32(0xFFFF)
    odd >>= np.uint32(16)  # 1 where any lower bit is set
    odd |= bits >> np.uint32(16)
    return odd


@cache
def _e4m3_codes() -> Bytes:
    grid = np.append(e4m3_values()[:127], 480.0)  # one step beyond 448: what reaches it overflows
    return _nearest(grid, sign=0x80, beyond=0x7F, nan=0x7F)


@cache
def _e2m1_codes() -> Bytes:
    return _nearest(np.array(E2M1_VALUES), sign=8, beyond=7, nan=0)


def _nearest(grid: npt.NDArray[np.float64], sign: int, beyond: int, nan: int) -> Bytes:
    """For every upper half of a float32, the code of the nearest grid value, ties to the even code."""
    with np.errstate(invalid="ignore"):  # some of the patterns are signaling NaN
        magnitude = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    middle = (grid[:-1] + grid[1:]) / 2
    code = np.searchsorted(middle, magnitude, side="left")
    tie = (code < len(middle)) & (middle[np.minimum(code, len(middle) - 1)] == magnitude)
    code += tie & (code % 2 == 1)
    code = np.where(np.isnan(magnitude), nan, np.minimum(code, beyond))
    return np.concatenate([code, code | sign]).astype(np.uint8)

"""Numbers that a program stores into fp8 tensors, encoded while compiling by the codecs' definition.

torch's own cast of an out-of-range number depends on its version (NaN before 2.13, 448 since); these
functions do not.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Callable

from deepinfer_prep.fp8 import decode_e4m3fn
from deepinfer_prep.runtime.backend.byte_formats import E4M3FN, E8M0, ByteFormat
from deepinfer_prep.runtime.backend.codecs import E4M3FN_NAN, E8M0_NAN, SIGN

Number = float | int | bool


_E4M3FN_MAGNITUDES = [decode_e4m3fn(code) for code in range(E4M3FN_NAN)]


def _to_float32(value: Number) -> float:
    """Rounded to float32, as torch's casts to fp8 do first; beyond its range +-infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _encode_e4m3fn(value: float) -> int:
    sign = SIGN if math.copysign(1.0, value) < 0 else 0
    if math.isnan(value):
        return sign | E4M3FN_NAN
    magnitude = abs(value)
    above = bisect_left(_E4M3FN_MAGNITUDES, magnitude)
    if above == len(_E4M3FN_MAGNITUDES):
        return sign | (above - 1)
    if above == 0 or _E4M3FN_MAGNITUDES[above] == magnitude:
        return sign | above
    # Neighbours differ by a power of two and their mean is exact; at a tie the even code wins.
    middle = (_E4M3FN_MAGNITUDES[above - 1] + _E4M3FN_MAGNITUDES[above]) / 2
    upper = magnitude > middle or (magnitude == middle and above % 2 == 0)
    return sign | (above if upper else above - 1)


def _encode_e8m0(value: float) -> int:
    magnitude = abs(value)
    if not magnitude <= 1.5 * 2.0**127 or magnitude == 1.5 * 2.0**127:
        return E8M0_NAN
    if magnitude <= 2.0**-127:
        return 0
    fraction, exponent = math.frexp(magnitude)
    return max(exponent - 1 + 127, 0) + (1 if fraction >= 0.75 or exponent - 1 < -126 else 0)


def _decode_e8m0(code: int) -> float:
    return math.nan if code == E8M0_NAN else math.ldexp(1.0, code - 127)


_ENCODERS: dict[ByteFormat, Callable[[float], int]] = {E4M3FN: _encode_e4m3fn, E8M0: _encode_e8m0}
_DECODERS: dict[ByteFormat, Callable[[int], float]] = {E4M3FN: decode_e4m3fn, E8M0: _decode_e8m0}


def encode_number(value: Number, fmt: ByteFormat) -> int:
    """The byte that stands for a Python number, by the definition of the format's `encode`."""
    return _ENCODERS[fmt](_to_float32(value))


def round_number(value: Number, fmt: ByteFormat) -> float:
    """The value that `fmt` holds for a number: what torch stores whatever its own rule for overflow."""
    return _DECODERS[fmt](encode_number(value, fmt))


def encode_nested(data: object, fmt: ByteFormat) -> object:
    """Nested lists of numbers, as torch.tensor takes them, with every number replaced by its byte."""
    if isinstance(data, (list, tuple)):
        return [encode_nested(item, fmt) for item in data]
    if isinstance(data, (float, int)):
        return encode_number(data, fmt)
    raise TypeError(f"expected numbers, found {type(data).__name__}")

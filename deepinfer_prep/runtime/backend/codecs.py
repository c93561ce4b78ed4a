"""fp8 bytes to floats and back, in arithmetic that a compiler for Trainium can neither fold nor round.

Each function here becomes one node of the legalized graph; AOT traces through it. What they keep to:

* Arithmetic is floating point, and every intermediate value is exact in the type that holds it. There is
  no exp2 (its accuracy on the device is unknown), no integer shift or mask (they run on the slow engine),
  and no (x + c) - c, which compilers simplify.
* A power of two is made by assembling the exponent field of a float as a number, converting that number to
  an integer of the float's width, which is exact, and reading the integer as a float.
* No value on the way is a subnormal of the type that holds it, so flushing subnormals changes nothing
  (e8m0 code 0 apart: its value 2^-127 is itself a float32 subnormal).
* `aten.add` and `aten.rsub` take a factor for one operand (`alpha`), hence one operation for "a + k * b".
* A tensor without elements is converted by torch's own cast, which alone keeps its strides.

Formats: OCP 8-bit floating point 1.0 (e4m3fn) and OCP microscaling 1.0 (e8m0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3FN_MAX = 448.0
E4M3FN_MIN_NORMAL = 2.0**-6
E4M3FN_NAN = 0x7F
E8M0_NAN = 0xFF

SIGN = 128
"""The weight of the sign bit in an e4m3fn byte."""
BIAS = 127
"""Exponent bias of float32 (and of bfloat16 and e8m0)."""
EXPONENT_UNIT = 2.0**23
"""One step of the exponent field of a float32, seen in its bits as an integer."""


@dataclass(frozen=True)
class _FloatLayout:
    """Where a float type keeps exponent and mantissa, and the integer type of the same width."""

    bits: torch.dtype
    mantissa: int
    bias: int


_LAYOUTS = {
    torch.float32: _FloatLayout(torch.int32, mantissa=23, bias=127),
    torch.bfloat16: _FloatLayout(torch.int16, mantissa=7, bias=127),
    torch.float16: _FloatLayout(torch.int16, mantissa=10, bias=15),
}


def decode_e4m3fn(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of e4m3fn bytes, exact; NaN for 0x7F and 0xFF, -0.0 for 0x80.

    codes: uint8, any shape. Returns `dtype` (any numeric type, converted from float32 as torch does).
    Eleven aten operations for float32, bfloat16 and float16.
    """
    if codes.numel() == 0:
        return codes.to(dtype)
    if dtype not in _LAYOUTS:
        return decode_e4m3fn(codes, torch.float32).to(dtype)
    layout = _LAYOUTS[dtype]
    unit = 2 ** (layout.mantissa - 3)
    negative = codes >= SIGN
    # The byte's exponent and mantissa moved to their place in the float, with the difference of the biases.
    field = torch.rsub(codes, float((layout.bias - 7) * 8 * unit), alpha=-unit)
    field = torch.add(field, negative, alpha=-SIGN * unit)
    normal = field.to(layout.bits).view(dtype)
    # Exponent field 0 has no hidden one: below 2^-6 the line 2x - 2^-6 is the lower of the two and the
    # value, above it x is.
    magnitude = torch.minimum(normal, torch.rsub(normal, -E4M3FN_MIN_NORMAL, alpha=-2))
    magnitude = magnitude.masked_fill(magnitude > E4M3FN_MAX, float("nan"))
    return torch.where(negative, -magnitude, magnitude)


def encode_e4m3fn(values: Tensor) -> Tensor:
    """The e4m3fn bytes of `values`, rounded to nearest even.

    Beyond 448, infinity included, the result is +-448; NaN gives 0x7F or 0xFF; signs are kept, those of
    zero and NaN too. Types other than float32 are converted to it first, as torch's own cast does.
    values: any shape and numeric type. Returns uint8. 29 aten operations, 30 from other float types.
    """
    if values.numel() == 0:
        return values.to(torch.uint8)
    values = values.to(torch.float32)
    limited = torch.clamp(values, -E4M3FN_MAX, E4M3FN_MAX)
    negative = limited.view(torch.int32) < 0
    magnitude = limited.abs()
    exponent = _biased_exponent(torch.clamp(magnitude, min=E4M3FN_MIN_NORMAL))
    # 8 / 2^exponent: brings the magnitude to units of its last place, 0..16.
    scale_field = torch.rsub(exponent, (2 * BIAS + 3) * EXPONENT_UNIT, alpha=EXPONENT_UNIT)
    steps = _round_half_even(magnitude * scale_field.to(torch.int32).view(torch.float32))
    lowest = BIAS - 6
    code = torch.add(steps, exponent, alpha=8) - 8.0 * lowest
    code = code.masked_fill(values != values, E4M3FN_NAN)
    code = code.to(torch.int32)
    # `negative` comes first and decides the strides, which masked_fill does not keep.
    return torch.where(negative, code + SIGN, code).to(torch.uint8)


def decode_e8m0(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values 2^(byte - 127) of e8m0 bytes, exact; NaN for 255.

    codes: uint8, any shape. Returns `dtype`. Code 0 is 2^-127, which hardware that flushes subnormals
    reads as zero.
    """
    if codes.numel() == 0:
        return codes.to(dtype)
    # Half a step of the exponent field is the top mantissa bit: it makes 2^-127 of 0 and NaN of infinity.
    field = codes * EXPONENT_UNIT
    field = torch.add(field, codes == 0, alpha=EXPONENT_UNIT / 2)
    field = torch.add(field, codes == E8M0_NAN, alpha=EXPONENT_UNIT / 2)
    return field.to(torch.int32).view(torch.float32).to(dtype)


def encode_e8m0(values: Tensor) -> Tensor:
    """The e8m0 bytes of |values|: the nearest power of two, the upper one from 1.5 on.

    Infinity, NaN and what rounds to 2^128 give 255; zero and what lies at or below 2^-127 give 0. The sign
    is dropped. This is torch's rule (Float8_e8m0fnu.h). values: any shape and type. Returns uint8.
    """
    if values.numel() == 0:
        return values.to(torch.uint8)
    magnitude = values.to(torch.float32).abs()
    exponent = torch.clamp(_biased_exponent(magnitude), max=float(E8M0_NAN))
    power = (exponent * EXPONENT_UNIT).to(torch.int32).view(torch.float32)
    # For exponent field 0 the power reads as zero; the tie at 2^-127 goes down.
    tie = torch.clamp(power * 1.5, min=2.0**-127 * (1 + 2.0**-22))
    code = torch.clamp(torch.add(exponent, magnitude >= tie), max=float(E8M0_NAN))
    return code.to(torch.int32).to(torch.uint8)


def scaled_mm(
    mat1: Tensor, mat2: Tensor, scale1: Tensor, scale2: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """torch._scaled_mm on decoded operands, in the order of torch's own CPU fallback.

    mat1: float32 [m, k]. mat2: float32 [k, n]. scale1, scale2: one element each, or [m, 1] and [1, n].
    bias: [n] or None. Returns `dtype` [m, n]; products are summed in float32.
    """
    product = torch.matmul(mat1 * _factor(scale1), mat2 * _factor(scale2))
    if bias is not None:
        product = product + bias
    return product.to(dtype)


def _factor(scale: Tensor) -> Tensor:
    return scale.reshape(()) if scale.numel() == 1 else scale


def _biased_exponent(magnitude: Tensor) -> Tensor:
    """The exponent field of non-negative float32 values, as a float32.

    Just below a power of two the conversion of the bits rounds up and gives the field of that power; both
    callers round such a value to the power itself, so either field leads to the same code.
    """
    return torch.floor(magnitude.view(torch.int32).to(torch.float32) * (1 / EXPONENT_UNIT))


def _round_half_even(values: Tensor) -> Tensor:
    """Non-negative float32 values below 2^20 to the nearest integer, ties to even.

    Built on floor because it is not known how the device rounds in `round`.
    """
    whole = torch.floor(values)
    fraction = values - whole
    odd = torch.sub(whole, torch.floor(whole * 0.5), alpha=2)
    # An odd whole part lifts exactly one half above the threshold and nothing else: where it is odd the
    # value is at least 1 and its fraction a multiple of 2^-23.
    up = torch.add(fraction, odd, alpha=2.0**-24) > 0.5
    return torch.add(whole, up)

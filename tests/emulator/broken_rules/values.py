"""Constants and the values that are written."""

from __future__ import annotations

from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator import rules

from tests.emulator.broken_rules import breaks
from tests.emulator.support import P, empty, tile


@breaks(rules.VALUE_INT, "tensor_scalar", "data")
def int32_beyond_fp32() -> None:
    t = tile((P, 4), nl.int32, value=2**24 + 1)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.add, operand0=1)


@breaks(rules.VALUE_INT, "tensor_copy", "src")
def int32_cast_beyond_fp32() -> None:
    nisa.tensor_copy(dst=empty((P, 4)), src=tile((P, 4), nl.int32, value=2**24 + 1))


@breaks(rules.CONSTANT, "tensor_scalar", "operand0")
def wide_immediate() -> None:
    t = tile((P, 4), nl.int32)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.bitwise_and, operand0=0x80808080)


@breaks(rules.CONSTANT, "tensor_scalar", "operand0")
def boolean_constant() -> None:
    nisa.tensor_scalar(dst=tile((P, 4)), data=tile((P, 4)), op0=nl.add, operand0=True)


@breaks(rules.CONSTANT, "tensor_scalar", "shift")
def shift_by_the_width() -> None:
    t = tile((P, 4), nl.uint8)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.left_shift, operand0=8)


@breaks(rules.MEMSET_VALUE, "memset", "value")
def float_into_integers() -> None:
    nisa.memset(dst=empty((P, 4), nl.int32), value=0.0)


@breaks(rules.MEMSET_VALUE, "memset", "value")
def boolean_into_floats() -> None:
    nisa.memset(dst=empty((P, 4)), value=True)


@breaks(rules.FP8_OVERFLOW, "tensor_scalar", "dst")
def fp8_overflow() -> None:
    nisa.tensor_scalar(dst=empty((P, 4), nl.float8_e4m3), data=tile((P, 4)), op0=nl.multiply, operand0=248.0)


@breaks(rules.NAN_TO_INT, "tensor_copy", "dst")
def nan_to_int() -> None:
    nisa.tensor_copy(dst=empty((P, 4), nl.int32), src=tile((P, 4), value=float("nan")))


@breaks(rules.ACTIVATION_RANGE, "activation", "data")
def rsqrt_of_zero() -> None:
    nisa.activation(dst=empty((P, 4)), op=nl.rsqrt, data=tile((P, 4), value=0.0))


@breaks(rules.ACTIVATION_RANGE, "activation", "data")
def reciprocal_of_a_tiny_number() -> None:
    nisa.activation(dst=empty((P, 4)), op=nl.reciprocal, data=tile((P, 4), value=-(2.0**-43)))


@breaks(rules.VALUE_INT, "tensor_scalar", "operand0")
def integer_constant_beyond_fp32() -> None:
    nisa.tensor_scalar(dst=tile((P, 4)), data=tile((P, 4)), op0=nl.add, operand0=2**24 + 1)


@breaks(rules.CONSTANT, "tensor_scalar", "operand0")
def float_constant_beyond_fp32() -> None:
    nisa.tensor_scalar(dst=tile((P, 4)), data=tile((P, 4)), op0=nl.add, operand0=1e39)


@breaks(rules.BITVEC, "tensor_scalar", "operand0")
def float_mask() -> None:
    t = tile((P, 4), nl.int32)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.bitwise_and, operand0=7.0)


@breaks(rules.IOTA_PATTERN, "iota", "pattern")
def iota_beyond_int32() -> None:
    nisa.iota(dst=empty((P, 4), nl.int32), pattern=[[2**30, 4]])


@breaks(rules.VALUE_INT, "iota", "dst")
def iota_beyond_fp32() -> None:
    nisa.iota(dst=empty((P, 4)), pattern=[[1, 4]], offset=2**24)


@breaks(rules.CONSTANT, "iota", "dst")
def iota_beyond_its_type() -> None:
    nisa.iota(dst=empty((P, 4), nl.uint8), pattern=[[100, 4]])


@breaks(rules.CONSTANT, "affine_select", "on_false_value")
def integer_where_a_float_is_needed() -> None:
    t = tile((P, 4))
    nisa.affine_select(dst=t, pattern=[[1, 4]], channel_multiplier=0, on_true_tile=t, on_false_value=0)


@breaks(rules.REGISTER, "register_alloc", "x")
def wide_register_constant() -> None:
    nisa.register_alloc(2**31)

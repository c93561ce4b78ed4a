"""What the elementwise instructions compute, against NumPy and ml_dtypes; small domains are enumerated."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nki_emulator import Options, RuleError, rules
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.isa import engine

from tests.emulator.support import P, empty, load, on_tiles, random, store, tile
from tests.emulator.support import execute as run_body

CODES = np.arange(256, dtype=np.uint8).reshape(2, 128)
FLUSH = Options(flush_subnormals=True)
SUBNORMAL = np.float32(2.0**-130)
FLOAT_TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3": ml_dtypes.float8_e4m3}


def cast(array: Any, dtype: Any, options: Options | None = None) -> Any:
    """tensor_copy of an array into another type."""

    def body(a: Any) -> Any:
        out = empty(a.shape, dtype)
        nisa.tensor_copy(dst=out, src=a)
        return out

    return on_tiles(body, array, options=options)


def decode(array: Any, dtype: Any) -> Any:
    """Bytes seen as `dtype`, copied to fp32."""

    def body(a: Any) -> Any:
        out = empty((a.shape[0], a.shape[1] // dtype.itemsize))
        nisa.tensor_copy(dst=out, src=a.view(dtype))
        return out

    return on_tiles(body, array)


# Reading


def test_all_e4m3_codes_decode_as_the_hardware_type() -> None:
    values = decode(CODES, nl.float8_e4m3).reshape(-1)
    np.testing.assert_array_equal(values, CODES.reshape(-1).view(ml_dtypes.float8_e4m3).astype(np.float32))
    assert values[0x77] == 240
    assert np.isinf(values[0x78])
    assert values[0xF8] == -np.inf
    assert np.isnan(values[0x79:0x80]).all()
    assert values[0x01] == 2.0**-9


def test_all_e4m3_codes_below_256_agree_with_e4m3fn() -> None:
    codes = np.concatenate([np.arange(0x78), np.arange(0x80, 0xF8)]).astype(np.uint8)[None, :]
    np.testing.assert_array_equal(decode(codes, nl.float8_e4m3), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_all_e5m2_codes() -> None:
    np.testing.assert_array_equal(decode(CODES, nl.float8_e5m2), CODES.view(ml_dtypes.float8_e5m2).astype(np.float32))


def test_all_bf16_bit_patterns_survive_a_copy() -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(P, 512)
    copied = cast(bits.view(ml_dtypes.bfloat16), nl.bfloat16)
    np.testing.assert_array_equal(copied.view(np.uint16), bits)


# Writing


@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_narrowing_rounds_to_nearest_even(name: str) -> None:
    values = random((P, 64)) * 16
    np.testing.assert_array_equal(cast(values, getattr(nl, name)), values.astype(FLOAT_TYPES[name]))


def test_e4m3_midpoints_go_to_the_even_neighbour() -> None:
    finite = np.arange(0x77, dtype=np.uint8)
    below, above = (c.view(ml_dtypes.float8_e4m3).astype(np.float32) for c in (finite, finite + 1))
    written = cast(((below + above) / 2)[None, :], nl.float8_e4m3).view(np.uint8)[0]
    np.testing.assert_array_equal(written, finite + finite % 2)


def test_fp8_rounds_up_to_240_and_refuses_248() -> None:
    largest = np.nextafter(np.float32(248), np.float32(0))
    assert cast(np.array([[largest]], np.float32), nl.float8_e4m3).astype(np.float32) == 240
    for value in (248.0, -np.inf, np.nan):
        with pytest.raises(RuleError) as caught:
            cast(np.array([[value]], np.float32), nl.float8_e4m3)
        assert caught.value.rule is rules.FP8_OVERFLOW


def test_bf16_and_fp16_overflow_to_infinity() -> None:
    huge = np.array([[3.4e38, -3.4e38]], np.float32)
    np.testing.assert_array_equal(cast(huge, nl.bfloat16).astype(np.float32), [[np.inf, -np.inf]])
    np.testing.assert_array_equal(cast(huge, nl.float16).astype(np.float32), [[np.inf, -np.inf]])


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_floats_to_integers_round_to_even_and_saturate(name: str) -> None:
    values = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 1e10, -1e10, 127.5, 300.0]], np.float32)
    limits = np.iinfo(name)
    expected = np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max).astype(name)
    np.testing.assert_array_equal(cast(values, getattr(nl, name)), expected)


def test_dma_casts_through_fp32_and_keeps_bits_without_a_cast() -> None:
    def body(a: Any) -> Any:
        wide = empty(a.shape, nl.bfloat16)
        nisa.dma_copy(dst=wide, src=a.view(nl.float8_e4m3))
        return store(wide)

    codes = np.arange(0x78, dtype=np.uint8)[None, :]
    np.testing.assert_array_equal(
        run_body(body, codes).output.astype(np.float32), codes.view(ml_dtypes.float8_e4m3).astype(np.float32)
    )
    nans = np.array([[0x7FC00001, 0xFF800123]], np.uint32).view(np.float32)
    np.testing.assert_array_equal(run_body(lambda a: store(load(a)), nans).output.view(np.uint32), nans.view(np.uint32))


# FTZ


def test_subnormals_are_kept_unless_flushed() -> None:
    values = np.array([[SUBNORMAL, -SUBNORMAL, 1.0]], np.float32)

    def double(a: Any) -> Any:
        nisa.tensor_scalar(dst=a, data=a, op0=nl.multiply, operand0=2.0)
        return a

    np.testing.assert_array_equal(on_tiles(double, values), values * 2)
    flushed = on_tiles(double, values, options=FLUSH)
    np.testing.assert_array_equal(flushed, [[0.0, 0.0, 2.0]])
    assert np.signbit(flushed[0, 1])


def test_intermediate_results_and_bf16_are_flushed_but_bit_copies_are_not() -> None:
    def shrink_and_grow(a: Any) -> Any:
        nisa.tensor_scalar(dst=a, data=a, op0=nl.multiply, operand0=2.0**-100, op1=nl.multiply, operand1=2.0**100)
        return a

    values = np.full((1, 2), 2.0**-30, np.float32)
    np.testing.assert_array_equal(on_tiles(shrink_and_grow, values), values)
    np.testing.assert_array_equal(on_tiles(shrink_and_grow, values, options=FLUSH), np.zeros((1, 2)))
    tiny = np.full((1, 2), SUBNORMAL).astype(ml_dtypes.bfloat16)
    assert cast(tiny, nl.float32, FLUSH).max() == 0
    np.testing.assert_array_equal(cast(tiny, nl.bfloat16, FLUSH), tiny)


def test_fp8_and_fp16_subnormals_are_no_fp32_subnormals() -> None:
    one = np.array([[1, 1]], np.uint8)

    def body(a: Any) -> Any:
        out = empty((1, 2))
        nisa.tensor_copy(dst=out, src=a.view(nl.float8_e4m3))
        return out

    np.testing.assert_array_equal(on_tiles(body, one, options=FLUSH), [[2.0**-9, 2.0**-9]])


# Operators

BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "less": np.less, "less_equal": np.less_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_tensor_tensor(name: str) -> None:
    a, b = np.rint(random((P, 32)) * 2), np.rint(random((P, 32), seed=1) * 2)

    def body(x: Any, y: Any) -> Any:
        nisa.tensor_tensor(dst=x, data1=x, data2=y, op=getattr(nl, name))
        return x

    np.testing.assert_array_equal(on_tiles(body, a, b), BINARY[name](a, b).astype(np.float32))


def test_all_int32_tensor_tensor_is_exact_and_wraps() -> None:
    a = np.array([[2**31 - 1, 2**30 + 1, -(2**31), 123456789]], np.int32)
    b = np.array([[1, 3, -1, 987654321]], np.int32)

    def body(op: Any) -> Any:
        def operate(x: Any, y: Any) -> Any:
            nisa.tensor_tensor(dst=x, data1=x, data2=y, op=op)
            return x

        return operate

    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(on_tiles(body(nl.add), a, b), a + b)
        np.testing.assert_array_equal(on_tiles(body(nl.multiply), a, b), a * b)
    np.testing.assert_array_equal(on_tiles(body(nl.greater), a, b), (a > b).astype(np.int32))


def test_int32_on_vector_engine_goes_through_fp32() -> None:
    def body(x: Any) -> Any:
        nisa.tensor_tensor(dst=x, data1=x, data2=x, op=nl.add, engine=engine.vector)
        return x

    small = np.array([[2**23 - 1, -7]], np.int32)
    np.testing.assert_array_equal(on_tiles(body, small), small * 2)
    with pytest.raises(RuleError) as caught:
        on_tiles(body, np.array([[2**24 + 1, 0]], np.int32))
    assert caught.value.rule is rules.VALUE_INT


@given(st.sampled_from(["uint8", "int8", "int32", "uint32"]), st.integers(0, 7), st.integers(0, 127))
@settings(max_examples=25, deadline=None)
def test_bitvec_operators(name: str, shift: int, mask: int) -> None:
    data = np.random.default_rng(shift).integers(0, 256, (4, 32)).astype(np.uint8)
    data = np.concatenate([data, 255 - data]).view(name) if name.endswith("8") else data.view(name)
    unsigned = data.view(f"u{data.dtype.itemsize}")

    def body(x: Any) -> Any:
        nisa.tensor_scalar(dst=x, data=x, op0=nl.right_shift, operand0=shift, op1=nl.bitwise_xor, operand1=mask)
        return x

    expected = ((unsigned >> unsigned.dtype.type(shift)) ^ unsigned.dtype.type(mask)).view(name)
    np.testing.assert_array_equal(on_tiles(body, data), expected)


def test_shift_left_reaches_the_sign_and_shift_right_does_not_copy_it() -> None:
    def shifted(op: Any, amount: int) -> Any:
        def body(x: Any) -> Any:
            nisa.tensor_scalar(dst=x, data=x, op0=op, operand0=amount)
            return x

        return on_tiles(body, np.array([[255, -1]], np.int32))

    np.testing.assert_array_equal(shifted(nl.left_shift, 23), [[255 << 23, -(2**23)]])
    np.testing.assert_array_equal(shifted(nl.right_shift, 28), [[0, 15]])


def test_e8m0_bytes_become_powers_of_two_by_a_shift() -> None:
    def body(x: Any) -> Any:
        words = empty(x.shape, nl.int32)
        nisa.tensor_copy(dst=words, src=x)
        nisa.tensor_scalar(dst=words, data=words, op0=nl.left_shift, operand0=23)
        return words.view(nl.float32)

    bytes_ = np.arange(1, 255, dtype=np.uint8)[None, :]
    np.testing.assert_array_equal(on_tiles(body, bytes_), np.ldexp(np.float32(1), bytes_.astype(np.int32) - 127))


def test_tensor_scalar_operands_constants_and_reversal() -> None:
    a, column = random((P, 16)), random((P, 1), seed=1)

    def body(x: Any, c: Any) -> Any:
        nisa.tensor_scalar(dst=x, data=x, op0=nl.subtract, operand0=c, reverse0=True, op1=nl.multiply, operand1=3.0)
        return x

    np.testing.assert_array_equal(on_tiles(body, a, column), (column - a) * np.float32(3))


def test_tensor_scalar_rounds_between_its_operators() -> None:
    a = random((P, 64))

    def body(x: Any) -> Any:
        nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=1.1, op1=nl.add, operand1=-1.0)
        return x

    np.testing.assert_array_equal(on_tiles(body, a), a * np.float32(1.1) - np.float32(1))


def test_unary_operators() -> None:
    a = random((P, 16)) + np.float32(4)

    def body(op: Any) -> Any:
        def operate(x: Any) -> Any:
            nisa.tensor_scalar(dst=x, data=x, op0=op, operand0=0.0)
            return x

        return operate

    np.testing.assert_array_equal(on_tiles(body(nl.abs), -a), np.abs(a))
    np.testing.assert_array_equal(on_tiles(body(nl.rsqrt), a), np.float32(1) / np.sqrt(a))
    np.testing.assert_array_equal(on_tiles(body(nl.reciprocal), a), np.float32(1) / a)


def test_scalar_tensor_tensor_is_a_multiply_add_with_two_roundings() -> None:
    a, b, column = random((P, 32)), random((P, 32), seed=1), random((P, 1), seed=2)

    def body(x: Any, y: Any, c: Any) -> Any:
        nisa.scalar_tensor_tensor(dst=x, data=x, op0=nl.multiply, operand0=c, op1=nl.add, operand1=y)
        return x

    np.testing.assert_array_equal(on_tiles(body, a, b, column), a * column + b)


def test_tensor_tensor_takes_broadcast_views() -> None:
    values, scales = random((P, 4, 32)), random((P, 4), seed=1)

    def body(x: Any, s: Any) -> Any:
        out = empty(x.shape, nl.bfloat16)
        nisa.tensor_tensor(dst=out, data1=x, data2=s.expand_dim(2).broadcast(2, 32), op=nl.multiply)
        return out

    np.testing.assert_array_equal(
        on_tiles(body, values, scales), (values * scales[:, :, None]).astype(ml_dtypes.bfloat16)
    )


def test_memset_of_every_kind() -> None:
    for dtype, value in ((nl.float32, 0.1), (nl.bfloat16, -2.5), (nl.int32, -(2**31)), (nl.uint8, 255)):
        out = run_body(lambda d=dtype, v=value: store(tile((P, 3), d, value=v))).output
        np.testing.assert_array_equal(out, np.full((P, 3), value, out.dtype))

"""The arithmetic over its whole domain, with ml_dtypes as the outside oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deepinfer_prep import fp8

CODES = np.arange(256, dtype=np.uint8)
VALUES = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def test_decode_equals_ml_dtypes_for_every_code() -> None:
    np.testing.assert_array_equal(fp8.DECODE_E4M3FN.astype(np.float64), VALUES)
    assert np.signbit(fp8.DECODE_E4M3FN[0x80])


def test_halve_equals_ml_dtypes_for_every_code() -> None:
    halved = np.empty_like(CODES)
    fp8.halve(CODES, halved)
    np.testing.assert_array_equal(halved, (VALUES / 2).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


ABOVE_240_HALVED = [
    (0x78, 256.0, 0x70, 128.0),
    (0x79, 288.0, 0x71, 144.0),
    (0x7A, 320.0, 0x72, 160.0),
    (0x7B, 352.0, 0x73, 176.0),
    (0x7C, 384.0, 0x74, 192.0),
    (0x7D, 416.0, 0x75, 208.0),
    (0x7E, 448.0, 0x76, 224.0),
    (0xF8, -256.0, 0xF0, -128.0),
    (0xF9, -288.0, 0xF1, -144.0),
    (0xFA, -320.0, 0xF2, -160.0),
    (0xFB, -352.0, 0xF3, -176.0),
    (0xFC, -384.0, 0xF4, -192.0),
    (0xFD, -416.0, 0xF5, -208.0),
    (0xFE, -448.0, 0xF6, -224.0),
]
"""The codes above 240, to be read by hand: code and value in e4m3fn, then code and value of the half in e4m3."""


@pytest.mark.parametrize(("code", "value", "half", "half_value"), ABOVE_240_HALVED)
def test_each_code_above_240_becomes_the_code_of_its_half(
    code: int, value: float, half: int, half_value: float
) -> None:
    assert fp8.HALVE[code] == half
    assert fp8.decode_e4m3fn(code) == value
    assert float(np.uint8(half).view(ml_dtypes.float8_e4m3)) == half_value == value / 2


def test_those_are_all_codes_above_240() -> None:
    assert tuple(code for code, *_ in ABOVE_240_HALVED) == fp8.ABOVE_240_CODES


def test_halving_rounds_exactly_the_named_codes_by_half_a_step() -> None:
    halved = np.frombuffer(fp8.HALVE, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    difference = np.abs(halved - VALUES / 2)
    assert set(np.flatnonzero(difference > 0)) == set(fp8.ROUNDED_CODES)
    assert np.nanmax(difference) == 2.0**-10


def test_every_halved_code_means_the_same_on_the_hardware() -> None:
    halved = np.frombuffer(fp8.HALVE, np.uint8)
    hardware = halved.view(ml_dtypes.float8_e4m3).astype(np.float64)
    np.testing.assert_array_equal(hardware, halved.view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    assert np.nanmax(hardware) == fp8.FP8_MAX


def test_misread_codes_are_those_that_the_two_types_read_differently() -> None:
    hardware = CODES.view(ml_dtypes.float8_e4m3).astype(np.float64)
    differing = ~((hardware == VALUES) | (np.isnan(hardware) & np.isnan(VALUES)))
    assert set(np.flatnonzero(differing)) == set(fp8.ABOVE_240_CODES)
    assert set(np.flatnonzero(np.isnan(VALUES))) == set(fp8.NAN_CODES)


def test_halve_works_in_place_across_piece_boundaries() -> None:
    codes = np.resize(CODES, 3 * fp8.PIECE_BYTES + 5)
    expected = np.frombuffer(fp8.HALVE, np.uint8)[codes]
    fp8.halve(codes, codes)
    np.testing.assert_array_equal(codes, expected)


def test_double_e8m0_equals_ml_dtypes_for_every_byte_that_has_a_double() -> None:
    codes = CODES[:254]
    doubled = np.empty_like(codes)
    fp8.double(codes, "F8_E8M0", doubled)
    values = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(doubled.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 2 * values)


@pytest.mark.parametrize("byte", [254, 255])
def test_double_e8m0_refuses_what_has_no_double(byte: int) -> None:
    codes = np.array([127, 0, byte, 127], dtype=np.uint8)
    with pytest.raises(fp8.NoExactResultError) as caught:
        fp8.double(codes, "F8_E8M0", codes)
    assert caught.value.index == 2


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("BF16", ml_dtypes.bfloat16), ("F16", np.float16)])
def test_double_16_bit_floats_over_all_bit_patterns(dtype: str, numpy_dtype: type) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        values = bits.view(numpy_dtype).astype(np.float64)
        doublable = np.isfinite((2 * values).astype(numpy_dtype).astype(np.float64))
    raw = bits[doublable].view(np.uint8).copy()
    fp8.double(raw, dtype, raw)
    doubled = raw.view(numpy_dtype).astype(np.float64)
    np.testing.assert_array_equal(doubled, 2 * values[doublable])
    np.testing.assert_array_equal(np.signbit(doubled), np.signbit(values[doublable]))
    for pattern in bits[~doublable]:
        with pytest.raises(fp8.NoExactResultError):
            fp8.double(np.array([pattern]).view(np.uint8), dtype, np.empty(2, np.uint8))


@pytest.mark.parametrize(("dtype", "float_dtype"), [("F32", np.float32), ("F64", np.float64)])
def test_double_wide_floats_at_every_exponent(dtype: str, float_dtype: type) -> None:
    info = np.finfo(float_dtype)
    exponents = np.arange(info.minexp - info.nmant, info.maxexp - 1)
    values = np.concatenate([s * np.ldexp(np.array(m, float_dtype), exponents) for s in (1, -1) for m in (1.0, 1.75)])
    values = values.astype(float_dtype)
    raw = values.view(np.uint8).copy()
    fp8.double(raw, dtype, raw)
    np.testing.assert_array_equal(raw.view(float_dtype), np.ldexp(values, 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max, -np.finfo(np.float32).max])
def test_double_f32_names_the_element_without_a_double(bad: float) -> None:
    values = np.array([1.0, 0.0, -2.0, bad, bad], dtype=np.float32)
    with pytest.raises(fp8.NoExactResultError) as caught:
        fp8.double(values.view(np.uint8), "F32", np.empty(20, np.uint8))
    assert caught.value.index == 3


@given(hnp.arrays(np.uint8, st.integers(0, 70_000)))
def test_counts_equal_a_plain_count(codes: np.ndarray) -> None:
    counts = fp8.count_codes(codes)
    assert counts.rounded == np.isin(codes, fp8.ROUNDED_CODES).sum()
    assert counts.nan == np.isin(codes, fp8.NAN_CODES).sum()
    assert counts.above_240 == np.isin(codes, fp8.ABOVE_240_CODES).sum()
    assert fp8.has_high_codes(codes) == (counts.nan + counts.above_240 > 0)


@pytest.mark.parametrize("code", range(256))
def test_counts_do_not_overflow_on_long_runs_of_one_code(code: int) -> None:
    codes = np.full(600_000, code, dtype=np.uint8)
    counts = fp8.count_codes(codes)
    expected = [600_000 * (code in group) for group in (fp8.ROUNDED_CODES, fp8.NAN_CODES, fp8.ABOVE_240_CODES)]
    assert [counts.rounded, counts.nan, counts.above_240] == expected
    assert fp8.has_high_codes(codes) == (code in fp8.NAN_CODES + fp8.ABOVE_240_CODES)


def as_float(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def test_hi_lo_rounds_as_ml_dtypes_and_keeps_its_bound_at_every_exponent() -> None:
    mantissas = np.concatenate([np.arange(0, 2**23, 4099), [1, 2**23 - 1, 0x7FFF, 0x8000, 0x8001, 0x18000]])
    for exponent in range(255):
        bits = (np.uint32(exponent) << 23) | mantissas.astype(np.uint32)
        values = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
        values = values[np.isfinite(values.astype(ml_dtypes.bfloat16).astype(np.float32))]
        hi, lo = fp8.split_hi_lo(values)
        expected = values.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(hi, expected.view(np.uint16))
        rest = (values - expected.astype(np.float32)).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(as_float(lo), rest.astype(np.float64))
        error = np.abs(values.astype(np.float64) - as_float(hi) - as_float(lo))
        assert (error <= np.maximum(2.0**-17 * np.abs(values.astype(np.float64)), 2.0**-134)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_hi_lo_refuses_what_is_not_finite_in_bf16(bad: float) -> None:
    with pytest.raises(fp8.NoExactResultError) as caught:
        fp8.split_hi_lo(np.array([[1.0, 2.0], [bad, 0.0]], dtype=np.float32))
    assert caught.value.index == 2


def test_hi_lo_of_nan_with_a_mantissa_that_would_wrap_is_refused() -> None:
    values = np.array([0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    with pytest.raises(fp8.NoExactResultError):
        fp8.split_hi_lo(values)

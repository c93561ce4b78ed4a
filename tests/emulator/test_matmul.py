"""Matmuls and transposes. Small integers make fp32 sums exact in any order."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki_emulator import Options
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.isa import engine, matmul_perf_mode

from tests.emulator.support import P, empty, execute, load, on_tiles, random, store, tile


def integers(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Integers from -4 to 4, exact in every float type."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


@pytest.mark.parametrize("left", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("right", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3])
def test_matmul_of_mixed_types(left: Any, right: Any) -> None:
    a, b = integers((P, 96)), integers((P, 512), seed=1)

    def body(x: Any, y: Any) -> Any:
        out = empty((96, 512), buffer=nl.psum)
        nisa.nc_matmul(dst=out, stationary=x, moving=y)
        return out

    np.testing.assert_array_equal(on_tiles(body, a.astype(left), b.astype(right)), a.T @ b)


def test_fp32_matmul_and_several_free_dimensions() -> None:
    a, b = integers((64, 32)), integers((64, 4, 8), seed=1)

    def body(x: Any, y: Any) -> Any:
        out = empty((32, 4, 8), buffer=nl.psum)
        nisa.nc_matmul(dst=out, stationary=x, moving=y)
        return out

    np.testing.assert_array_equal(on_tiles(body, a, b).reshape(32, 32), a.T @ b.reshape(64, 32))


@pytest.mark.parametrize("flags", [(False, True, True), (None, None, None)])
def test_accumulation_over_k_tiles(flags: tuple[bool | None, ...]) -> None:
    a, b = integers((P, 3, 16)), integers((P, 3, 24), seed=1)

    def body(x: Any, y: Any) -> Any:
        out = empty((16, 24), buffer=nl.psum)
        for k in range(3):
            nisa.nc_matmul(dst=out, stationary=x[:, k, :], moving=y[:, k, :], accumulate=flags[k])
        return out

    np.testing.assert_array_equal(on_tiles(body, a, b), np.einsum("pkm,pkn->mn", a, b))


def test_accumulate_false_starts_a_new_group_and_none_keeps_adding() -> None:
    a = integers((P, 8))

    def twice(flag: bool | None) -> Any:
        def body(x: Any) -> Any:
            out = empty((8, 8), buffer=nl.psum)
            for _ in range(2):
                nisa.nc_matmul(dst=out, stationary=x, moving=x, accumulate=flag)
            return out

        return on_tiles(body, a)

    np.testing.assert_array_equal(twice(False), a.T @ a)
    np.testing.assert_array_equal(twice(None), 2 * (a.T @ a))


def test_infinite_and_nan_codes_poison_the_row() -> None:
    codes = np.full((P, 4), 0x38, np.uint8)
    codes[3, 1], codes[5, 2] = 0x78, 0x7F

    def body(x: Any) -> Any:
        out = empty((4, P), buffer=nl.psum)
        nisa.nc_matmul(
            dst=out, stationary=x.view(nl.float8_e4m3), moving=nl.shared_identity_matrix(P, dtype=nl.bfloat16)
        )
        return out

    result = on_tiles(body, codes)
    assert np.isfinite(result[[0, 3]]).all()
    assert np.isinf(result[1, 3])
    assert np.isnan(np.delete(result[1], 3)).all()
    assert np.isnan(result[2]).all()


def test_identity_matmul_widens_and_transposes_fp8_exactly() -> None:
    codes = np.random.default_rng(0).integers(0, 0x78, (P, P)).astype(np.uint8)

    def body(x: Any) -> Any:
        out = empty((P, P), buffer=nl.psum)
        nisa.nc_matmul(
            dst=out, stationary=x.view(nl.float8_e4m3), moving=nl.shared_identity_matrix(P, dtype=nl.bfloat16)
        )
        return out

    np.testing.assert_array_equal(on_tiles(body, codes), codes.view(ml_dtypes.float8_e4m3).astype(np.float32).T)


def test_double_row_contracts_256() -> None:
    a, b = integers((P, 2, 32)), integers((P, 2, 48), seed=1)

    def body(x: Any, y: Any) -> Any:
        out = empty((32, 48), buffer=nl.psum)
        nisa.nc_matmul(dst=out, stationary=x, moving=y, perf_mode=matmul_perf_mode.double_row)
        return out

    result = on_tiles(body, a.astype(ml_dtypes.float8_e4m3), b.astype(ml_dtypes.float8_e5m2))
    np.testing.assert_array_equal(result, np.einsum("psm,psn->mn", a, b))


def test_row_tiles() -> None:
    a, b = integers((P, 8)), integers((P, 16), seed=1)

    def body(x: Any, y: Any) -> Any:
        out = empty((8, 4, 16), buffer=nl.psum)
        for row in range(4):
            part = slice(32 * row, 32 * row + 32)
            nisa.nc_matmul(
                dst=out[:, row, :], stationary=x[part, :], moving=y[part, :], accumulate=False,
                tile_position=(32 * row, 0), tile_size=(32, 128),
            )  # fmt: skip
        return out

    expected = np.stack([a[r : r + 32].T @ b[r : r + 32] for r in range(0, P, 32)], axis=1)
    np.testing.assert_array_equal(on_tiles(body, a, b), expected)


def test_flushing_matmul_inputs() -> None:
    tiny = np.full((P, 4), 2.0**-130, ml_dtypes.bfloat16)

    def body(x: Any) -> Any:
        out = empty((4, 4), buffer=nl.psum)
        nisa.nc_matmul(dst=out, stationary=x, moving=tile((P, 4), nl.bfloat16))
        return out

    assert on_tiles(body, tiny).min() == 2.0**-123
    assert on_tiles(body, tiny, options=Options(flush_subnormals=True)).max() == 0


# Transposes


@pytest.mark.parametrize("word", [np.uint16, np.uint32])
def test_tensor_engine_transposes_bit_for_bit(word: Any) -> None:
    bits = np.random.default_rng(0).integers(0, np.iinfo(word).max, (64, P), dtype=word)
    floats = bits.view(ml_dtypes.bfloat16 if word is np.uint16 else np.float32)

    def body(x: Any) -> Any:
        out = empty((P, 64), x.dtype, nl.psum)
        nisa.nc_transpose(dst=out, data=x)
        return out

    np.testing.assert_array_equal(on_tiles(body, floats).view(word), bits.T)


def test_transposing_matmul_is_nc_transpose() -> None:
    values = random((P, 32)).astype(ml_dtypes.bfloat16)

    def body(x: Any) -> Any:
        out = empty((32, P), nl.bfloat16, nl.psum)
        nisa.nc_matmul(dst=out, stationary=x, moving=nl.shared_identity_matrix(P, dtype=nl.bfloat16), is_transpose=True)
        return out

    np.testing.assert_array_equal(on_tiles(body, values), values.T)


def test_fp8_transpose_writes_every_other_byte() -> None:
    codes = np.arange(64 * 32, dtype=np.uint64).astype(np.uint8).reshape(32, 64)

    def body(a: Any) -> Any:
        spread = empty((64, 32, 2), nl.float8_e4m3, nl.psum)
        nisa.nc_transpose(dst=spread[:, :, 0], data=load(a).view(nl.float8_e4m3))
        packed = empty((64, 32), nl.float8_e4m3)
        nisa.tensor_copy(dst=packed, src=spread[:, :, 0])
        return store(packed.view(nl.uint8))

    np.testing.assert_array_equal(execute(body, codes).output, codes.T)


def test_vector_engine_transpose_and_flattened_free_dimensions() -> None:
    square, wide = random((32, 16)), random((P, 4, 8), seed=1)

    def small(x: Any) -> Any:
        out = empty((16, 32))
        nisa.nc_transpose(dst=out, data=x, engine=engine.vector)
        return out

    def flattened(x: Any) -> Any:
        out = empty((32, P), buffer=nl.psum)
        nisa.nc_transpose(dst=out, data=x)
        return out

    np.testing.assert_array_equal(on_tiles(small, square), square.T)
    np.testing.assert_array_equal(on_tiles(flattened, wide), wide.reshape(P, 32).T)


@pytest.mark.parametrize("shape", [(16, 24), (6, 4, 24), (6, 2, 3, 8)])
def test_dma_transpose(shape: tuple[int, ...]) -> None:
    values = random(shape)
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]

    def body(a: Any) -> Any:
        out = empty(tuple(shape[axis] for axis in axes))
        nisa.dma_transpose(dst=out, src=a, axes=axes)
        return store(out)

    np.testing.assert_array_equal(execute(body, values).output, values.transpose(axes))


# A sum does not depend on what stands beside it


def wide(shape: tuple[int, ...], seed: int) -> Any:
    """fp32 values over ten decades, whose sums round differently in every order."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 10.0 ** generator.uniform(-5, 5, shape)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("depth", [1, 7, 32, P])
def test_a_block_of_a_matmul_does_not_depend_on_the_rest_of_the_shape(depth: int, dtype: Any) -> None:
    with np.errstate(over="ignore"):
        a, b = np.clip(wide((depth, P), 0), -6e4, 6e4).astype(dtype), wide((depth, 512), 1).astype(dtype)
    b[0, 500] = np.inf
    whole = matmul(a, b)
    for rows, columns in ((slice(0, 1), slice(3, 4)), (slice(5, 38), slice(0, 256)), (slice(100, P), slice(490, 512))):
        block = matmul(np.ascontiguousarray(a[:, rows]), np.ascontiguousarray(b[:, columns]))
        np.testing.assert_array_equal(block.view(np.uint32), whole[rows, columns].copy().view(np.uint32))


def test_a_matmul_is_the_exact_sum_rounded_once() -> None:
    a, b = wide((P, 8), 2), wide((P, 8), 3)
    exact = [[math.fsum(float(x) * float(y) for x, y in zip(a[:, i], b[:, j], strict=True)) for j in range(8)]
             for i in range(8)]  # fmt: skip
    np.testing.assert_allclose(matmul(a, b), np.float32(exact), rtol=2.0**-23)
    np.testing.assert_array_equal(matmul(a[:2], b[:2]), np.float32(a[0].astype(float)[:, None] * b[0].astype(float)
                                  + a[1].astype(float)[:, None] * b[1].astype(float)))  # fmt: skip


def test_a_reduction_does_not_depend_on_how_many_rows_there_are_nor_on_how_they_lie() -> None:
    data = wide((P, 24, 37), 4)

    def body(x: Any) -> Any:
        out = empty((x.shape[0], 1))
        nisa.tensor_reduce(dst=out, op=nl.add, data=x, axis=(1, 2))
        return out

    def transposed(x: Any) -> Any:
        return body(x.permute((0, 2, 1)))

    whole = on_tiles(body, data)
    np.testing.assert_array_equal(on_tiles(body, data[:1]), whole[:1])
    swapped = np.ascontiguousarray(data.transpose(0, 2, 1))
    np.testing.assert_array_equal(on_tiles(transposed, swapped), whole)


def matmul(a: Any, b: Any) -> Any:
    """nc_matmul of two arrays."""

    def body(x: Any, y: Any) -> Any:
        out = empty((x.shape[1], y.shape[1]), buffer=nl.psum)
        nisa.nc_matmul(dst=out, stationary=x, moving=y)
        return out

    return on_tiles(body, a, b)

"""Reductions, activations, selections and generated patterns, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.isa import reduce_cmd

from tests.emulator.support import P, empty, execute, on_tiles, random, store, tile


@pytest.mark.parametrize(
    ("name", "expected"), [("add", np.sum), ("multiply", np.prod), ("maximum", np.max), ("minimum", np.min)]
)
def test_tensor_reduce_over_trailing_axes(name: str, expected: Any) -> None:
    values = random((P, 6, 8))

    def body(axis: Any, shape: tuple[int, ...]) -> Any:
        def reduce(x: Any) -> Any:
            out = empty(shape)
            nisa.tensor_reduce(dst=out, op=getattr(nl, name), data=x, axis=axis)
            return out

        return on_tiles(reduce, values)

    np.testing.assert_allclose(body(2, (P, 6)), expected(values, axis=2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(body((1, 2), (P, 1))[:, 0], expected(values, axis=(1, 2)), rtol=1e-5, atol=1e-5)


def test_tensor_reduce_negates_keeps_dims_and_reads_views() -> None:
    values = random((P, 4, 8))

    def body(x: Any) -> Any:
        out = empty((P, 8, 1))
        nisa.tensor_reduce(dst=out, op=nl.maximum, data=x.permute((0, 2, 1)), axis=2, negate=True, keepdims=True)
        return out

    np.testing.assert_array_equal(on_tiles(body, values)[:, :, 0], -values.max(axis=1))


def test_subtracting_and_bitvec_reductions() -> None:
    values, bits = np.arange(8, dtype=np.float32)[None, :], np.array([[1, 2, 4, 9]], np.uint8)

    def reduced(op: Any, array: Any) -> Any:
        def body(x: Any) -> Any:
            out = empty((1, 1), x.dtype)
            nisa.tensor_reduce(dst=out, op=op, data=x, axis=1)
            return out

        return on_tiles(body, array)[0, 0]

    assert reduced(nl.subtract, values) == -28
    assert reduced(nl.bitwise_or, bits) == 15
    assert reduced(nl.bitwise_xor, bits) == 1 ^ 2 ^ 4 ^ 9


def test_tensor_scalar_reduce_finds_the_absolute_maximum() -> None:
    values = random((P, 32))

    def body(x: Any) -> Any:
        scratch, out = empty(x.shape, nl.bfloat16), empty((P, 1))
        nisa.tensor_scalar_reduce(dst=scratch, data=x, op0=nl.abs, operand0=0.0, reduce_op=nl.maximum, reduce_res=out)
        return out

    np.testing.assert_array_equal(on_tiles(body, values)[:, 0], np.abs(values).max(axis=1))


ACTIVATIONS = {
    "copy": lambda x: x, "square": np.square, "abs": np.abs, "sign": np.sign, "tanh": np.tanh, "exp": np.exp,
    "relu": lambda x: np.maximum(x, 0), "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "arctan": np.arctan,
    "silu": lambda x: x / (1 + np.exp(-x)), "softplus": lambda x: np.log1p(np.exp(x)), "sin": np.sin,
}  # fmt: skip
POSITIVE = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": lambda x: 1 / x}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *POSITIVE])
def test_activation_functions(name: str) -> None:
    values = np.clip(random((P, 32)), -1.5, 1.5)
    values = np.abs(values) + np.float32(0.1) if name in POSITIVE else values

    def body(x: Any) -> Any:
        nisa.activation(dst=x, op=getattr(nl, name), data=x)
        return x

    expected = {**ACTIVATIONS, **POSITIVE}[name](values.astype(np.float64))
    np.testing.assert_allclose(on_tiles(body, values), expected, rtol=1e-6, atol=1e-7)


def test_activation_scales_then_adds_then_applies() -> None:
    values, scale, bias = random((P, 16)), random((P, 1), seed=1), random((P, 1), seed=2)

    def body(x: Any, s: Any, b: Any) -> Any:
        out = empty(x.shape, nl.bfloat16)
        nisa.activation(dst=out, op=nl.relu, data=x, scale=s, bias=b)
        return out

    expected = np.maximum(values * scale + bias, np.float32(0)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(on_tiles(body, values, scale, bias), expected)


def test_activation_sums_over_several_instructions() -> None:
    values = random((P, 64))

    def body(x: Any) -> Any:
        scratch, total = empty((P, 32)), empty((P, 1))
        commands = (reduce_cmd.reset_reduce, reduce_cmd.reduce)
        for half, command in enumerate(commands):
            nisa.activation(
                dst=scratch, op=nl.square, data=x[:, 32 * half : 32 * half + 32], reduce_op=nl.add,
                reduce_res=total if half == 1 else None, reduce_cmd=command,
            )  # fmt: skip
        return total

    np.testing.assert_allclose(on_tiles(body, values)[:, 0], np.square(values).sum(axis=1), rtol=1e-6)


def test_activation_reduce_starts_from_zero() -> None:
    values = random((P, 8))

    def body(x: Any) -> Any:
        scratch, total = empty((P, 8)), empty((P, 1))
        for _ in range(2):
            nisa.activation_reduce(dst=scratch, op=nl.copy, data=x, reduce_op=nl.add, reduce_res=total)
        return total

    np.testing.assert_allclose(on_tiles(body, values)[:, 0], values.sum(axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_predicated_copy_and_select(reverse: bool) -> None:
    a, b = random((P, 8)), random((P, 8), seed=1)
    mask = (random((P, 8), seed=2) > 0).astype(np.uint8) * 7
    chosen = (mask == 0) if reverse else (mask != 0)

    def predicated(x: Any, y: Any, m: Any) -> Any:
        nisa.tensor_copy_predicated(dst=x, src=y, predicate=m, reverse_pred=reverse)
        return x

    def select(x: Any, m: Any) -> Any:
        nisa.select_reduce(dst=x, predicate=m, on_true=x, on_false=-1.0, reverse_pred=reverse)
        return x

    np.testing.assert_array_equal(on_tiles(predicated, a, b, mask), np.where(chosen, b, a))
    np.testing.assert_array_equal(on_tiles(select, a, mask), np.where(chosen, a, np.float32(-1)))


def test_shuffle_moves_partitions_inside_each_quadrant() -> None:
    values = random((64, 4))
    mask = [(i + 1) % 32 for i in range(31)] + [255]

    def body(x: Any) -> Any:
        out = tile((64, 4), value=9.0)
        nisa.nc_stream_shuffle(dst=out, src=x, shuffle_mask=mask)
        return out

    result = on_tiles(body, values)
    for quadrant in (0, 32):
        np.testing.assert_array_equal(result[quadrant : quadrant + 31], values[quadrant + 1 : quadrant + 32])
        np.testing.assert_array_equal(result[quadrant + 31], np.full(4, 9))


def test_shuffle_broadcasts_a_partition_in_place() -> None:
    values = random((32, 4))

    def body(x: Any) -> Any:
        nisa.nc_stream_shuffle(dst=x, src=x, shuffle_mask=[5] * 32)
        return x

    np.testing.assert_array_equal(on_tiles(body, values), np.repeat(values[5:6], 32, axis=0))


def test_iota_and_affine_select() -> None:
    def numbers() -> Any:
        out = empty((P, 3, 4), nl.int32)
        nisa.iota(dst=out, pattern=[[100, 3], [1, 4]], offset=-5, channel_multiplier=1000)
        return store(out)

    p, i, j = np.ogrid[0:P, 0:3, 0:4]
    np.testing.assert_array_equal(execute(numbers).output, p * 1000 + i * 100 + j - 5)
    values = random((P, P))

    def lower_triangle(x: Any) -> Any:
        out = empty(x.shape)
        nisa.affine_select(
            dst=out, pattern=[[-1, P]], channel_multiplier=1, on_true_tile=x, on_false_value=0.0,
            cmp_op=nl.greater_equal,
        )  # fmt: skip
        return out

    np.testing.assert_array_equal(on_tiles(lower_triangle, values), np.tril(values))


def test_predicated_copy_takes_its_source_from_psum() -> None:
    values = random((P, 8))

    def body(x: Any) -> Any:
        source, out = empty((P, 8), buffer=nl.psum), tile((P, 8), value=0.0)
        nisa.tensor_copy(dst=source, src=x)
        nisa.tensor_copy_predicated(dst=out, src=source, predicate=tile((P, 8), nl.uint8))
        return out

    np.testing.assert_array_equal(on_tiles(body, values), values)


def test_accumulators_belong_to_partitions() -> None:
    values = random((P, 8))

    def body(x: Any) -> Any:
        scratch, total = empty((P, 8)), empty((P, 1))
        for half in (slice(0, 64), slice(64, P)):
            nisa.activation(
                dst=scratch[half, :], op=nl.copy, data=x[half, :], reduce_op=nl.add, reduce_cmd=reduce_cmd.reset_reduce
            )
        nisa.activation(
            dst=scratch, op=nl.copy, data=x, reduce_op=nl.add, reduce_res=total, reduce_cmd=reduce_cmd.reduce
        )
        return total

    np.testing.assert_allclose(on_tiles(body, values)[:, 0], 2 * values.sum(axis=1), rtol=1e-5, atol=1e-6)

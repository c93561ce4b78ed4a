"""The block scale of the kernels: where it comes from, and every byte of it against a reading of the definition."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_prep import kernel_scale
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.kernel_scale import (
    Absent,
    Derived,
    KernelScale,
    NoKernelScaleError,
    Stored,
    derive,
    is_outside_kernels,
    plan_kernel_scale,
    resolve,
)
from deepinfer_prep.quantized import Element, QuantizedWeight, grid_shape, tensor_nbytes

Block = tuple[int, int]
Bytes = npt.NDArray[np.uint8]


def info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0, tensor_nbytes(dtype, shape))


def plan_for(
    shape: tuple[int, ...],
    scale_dtype: str,
    scale_shape: tuple[int, ...],
    block: Block | None,
    element: Element = "e4m3",
    **reasons: str,
) -> KernelScale:
    quantized = QuantizedWeight("w", "s", element, block, **reasons)
    weight = info("w", "F8_E4M3" if element == "e4m3" else "I8", shape)
    return plan_kernel_scale(quantized, weight, info("s", scale_dtype, scale_shape))


def derived_bytes(plan: Derived, raw: bytes) -> Bytes:
    stored = np.frombuffer(raw, np.uint8)
    return np.concatenate([chunk.copy() for chunk in derive(plan, lambda start, stop: stored[start:stop])])


POWERS, ROWS = "every value is a power of two", "rows that share a block of 32 agree"


@pytest.mark.parametrize(
    ("dtype", "grid", "block", "conditions"),
    [
        ("F32", (1, 2), (128, 128), (POWERS,)),
        ("F8_E8M0", (1, 2), (128, 128), ()),
        ("F8_E8M0", (128, 8), (1, 32), (ROWS,)),
        ("BF16", (128, 1), (1, 256), (POWERS, ROWS)),
        ("BF16", (1, 1), (128, 256), (POWERS,)),
    ],
)
def test_what_the_values_have_to_fulfil_is_said(
    dtype: str, grid: tuple[int, int], block: Block, conditions: tuple[str, ...]
) -> None:
    plan = plan_for((128, 256), dtype, grid, block)
    assert isinstance(plan, Derived)
    assert plan.conditions == conditions


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
@pytest.mark.parametrize(
    ("shape", "grid", "block", "element"),
    [
        ((64, 96), (2, 3), (32, 32), "e4m3"),
        ((80, 100), (3, 4), (32, 32), "e4m3"),
        ((5, 64, 96), (5, 2, 3), (32, 32), "e4m3"),
        ((64, 48), (64, 3), (1, 32), "e2m1"),
        ((2, 64, 48), (2, 64, 3), (1, 32), "e2m1"),
    ],
)
def test_a_stored_scale_of_the_kernels_form_is_used_as_it_is(
    shape: tuple[int, ...], grid: tuple[int, ...], block: Block, element: Element, dtype: str
) -> None:
    plan = plan_for(shape, dtype, grid, block, element)
    assert plan == Stored()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (((64, 64), "F32", (2, 2), None), "nothing states the block size"),
        (((64, 64), "F32", (4, 2), (20, 32)), "blocks of 20x32 do not line up with the kernel's blocks of 32x32"),
        (((64, 64), "F32", (2, 4), (32, 20)), "blocks of 32x20 do not line up with the kernel's blocks of 32x32"),
        (((64, 64), "F32", (2, 4), (32, 16)), "blocks of 32x16 do not line up with the kernel's blocks of 32x32"),
        (((3, 64, 64), "F32", (2, 2), (32, 32)), "the scale has 4 values where 3 x (2, 2) are needed"),
        (((64, 32), "F32", (64, 2), (1, 32), "e2m1"), "an fp4 weight's kernel scale is one e8m0 byte a row"),
        (((64, 32), "F8_E8M0", (2, 2), (32, 32), "e2m1"), "an fp4 weight's kernel scale is one e8m0 byte a row"),
    ],
)
def test_what_headers_alone_rule_out_has_a_reason(arguments: tuple[object, ...], reason: str) -> None:
    plan = plan_for(*arguments)  # type: ignore[arg-type]
    assert isinstance(plan, Absent)
    assert plan.reason.startswith(reason)


def test_the_familys_reasons_come_first() -> None:
    table = plan_for((64, 64), "F8_E8M0", (2, 2), (32, 32), no_kernel_scale="it is a table")
    unknown = plan_for((64, 64), "F8_E8M0", (2, 2), None, block_problem="the grid is odd")
    assert (table, unknown) == (Absent("it is a table"), Absent("the grid is odd"))


@pytest.mark.parametrize(
    ("shape", "element", "outside"),
    [
        ((32, 128), "e4m3", False),
        ((64, 64), "e2m1", False),
        ((2, 64, 256), "e4m3", False),
        ((80, 128), "e4m3", True),
        ((64, 100), "e4m3", True),
        ((64, 96), "e2m1", True),
    ],
)
def test_the_kernels_limits(shape: tuple[int, ...], element: Element, outside: bool) -> None:
    assert is_outside_kernels(info("w", "I8", shape), element) == outside


EXTREMES = {"F64": (-127, 127), "F32": (-127, 127), "BF16": (-127, 127), "F16": (-24, 15)}
"""The exponents that both a dtype and e8m0 hold."""


def encode(dtype: str, exponents: npt.NDArray[np.int_]) -> bytes:
    values = np.exp2(exponents.astype(np.float64))
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype]).tobytes()


@pytest.mark.parametrize("dtype", EXTREMES)
def test_every_power_of_two_becomes_its_biased_exponent(dtype: str) -> None:
    low, high = EXTREMES[dtype]
    exponents = np.arange(low, high + 1)
    plan = plan_for((32 * exponents.size, 32), dtype, (exponents.size, 1), (32, 32))
    assert isinstance(plan, Derived)
    np.testing.assert_array_equal(derived_bytes(plan, encode(dtype, exponents)), exponents + 127)


@pytest.mark.parametrize(
    "value", [0.0, -1.0, 3.0, 1 + 2.0**-52, math.nan, math.inf, 2.0**-128, 2.0**128, 5e-324, -0.0], ids=repr
)
def test_other_values_have_no_kernel_form(value: float) -> None:
    plan = plan_for((32, 64), "F64", (1, 2), (32, 32))
    assert isinstance(plan, Derived)
    with pytest.raises(NoKernelScaleError, match="not every scale is a positive power of two"):
        derived_bytes(plan, np.array([1.0, value]).tobytes())


def brute_force(shape: tuple[int, int, int], block: Block, exponents: npt.NDArray[np.int_]) -> Bytes | None:
    """Byte by byte: the one exponent of all elements of a 32x32 block, or nothing where they differ."""
    matrices, rows, columns = shape
    grid = grid_shape(rows, columns, block)
    result = np.zeros((matrices, -(-rows // 32), -(-columns // 32)), np.uint8)
    for matrix, row, column in np.ndindex(result.shape):
        covering = {
            int(exponents[matrix, r // block[0], c // block[1]])
            for r in range(row * 32, min(row * 32 + 32, rows))
            for c in range(column * 32, min(column * 32 + 32, columns))
        }
        if len(covering) != 1:
            return None
        result[matrix, row, column] = covering.pop() + 127
    assert exponents.shape == (matrices, *grid)
    return result


@given(
    matrices=st.integers(1, 3),
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    row_block=st.sampled_from([1, 2, 8, 16, 32, 64, 96, 128, 500]),
    column_block=st.sampled_from([32, 64, 128, 500]),
    dtype=st.sampled_from(["F8_E8M0", "U8", *EXTREMES]),
    is_uniform=st.booleans(),
    at_once=st.sampled_from([1, 40, 4 * 1024 * 1024]),
    seed=st.integers(0, 2**16),
)
def test_derived_scales_are_what_the_definition_says(
    matrices: int,
    rows: int,
    columns: int,
    row_block: int,
    column_block: int,
    dtype: str,
    is_uniform: bool,
    at_once: int,
    seed: int,
) -> None:
    """`is_uniform` lets the rows of a block of 32 agree, which chance alone never does."""
    block = (row_block, column_block)
    grid = grid_shape(rows, columns, block)
    exponents = np.random.default_rng(seed).integers(-14, 15, (matrices, *grid))
    if is_uniform and row_block < 32:
        exponents = exponents[:, np.arange(grid[0]) // (32 // row_block)]
    plan = plan_for((matrices, rows, columns), dtype, (matrices, *grid), block)
    raw = (exponents + 127).astype(np.uint8).tobytes() if dtype in ("F8_E8M0", "U8") else encode(dtype, exponents)
    expected = brute_force((matrices, rows, columns), block, exponents)
    if plan == Stored():
        assert expected is not None
        assert expected.tobytes() == raw
        return
    assert isinstance(plan, Derived), plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_scale, "_ROWS_AT_ONCE_BYTES", at_once)
        stored = np.frombuffer(raw, np.uint8)
        resolved = resolve(plan, lambda start, stop: stored[start:stop])
        assert isinstance(resolved, Absent) == (expected is None)
        if expected is None:
            with pytest.raises(NoKernelScaleError, match="rows that share a block of 32 have different scales"):
                derived_bytes(plan, raw)
        else:
            assert plan.shape == expected.shape
            np.testing.assert_array_equal(derived_bytes(plan, raw), expected.ravel())

"""DMA of rows that an index tile names, arguments that a kernel writes, and what both cores write alike."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki_emulator import Options, TensorSpec, run
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.jit import jit

from tests.emulator.support import P, empty, execute, load, random, store, tile


def column(indices: Any, dtype: Any = np.int32) -> Any:
    return np.array(indices, dtype)[:, None]


@pytest.mark.parametrize("form", ["ap", "vector_select"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_rows_are_gathered_in_the_order_of_the_indices(form: str, dtype: Any) -> None:
    data, indices = random((20, 6)), np.random.default_rng(0).integers(0, 20, P)

    def body(x: Any, i: Any) -> Any:
        index, out = load(i), empty((P, 6))
        rows = x.vector_select(0, index) if form == "vector_select" else x.ap([[6, P], [1, 6]], vector_offset=index)
        assert rows.is_indirect()
        nisa.dma_copy(dst=out, src=rows, dge_mode=nisa.dge_mode.swdge)
        return store(out)

    result = execute(body, data, column(indices, dtype))
    np.testing.assert_array_equal(result.output, data[indices])
    gather = next(i for i in result.instructions or () if i.flag("gather") == "True")
    assert gather.flag("dge") == "swdge"


def test_part_of_a_row_and_a_cast() -> None:
    data = random((20, 6))

    def body(x: Any, i: Any) -> Any:
        out = empty((4, 3), nl.bfloat16)
        nisa.dma_copy(dst=out, src=x.ap([[6, 4], [2, 3]], offset=1, vector_offset=load(i)))
        return store(out)

    result = execute(body, data, column([3, 19, 0, 3])).output
    np.testing.assert_array_equal(result, data[[3, 19, 0, 3], 1::2].astype(ml_dtypes.bfloat16))


def test_skipped_rows_keep_what_was_there() -> None:
    data = random((5, 4))

    def body(x: Any, i: Any) -> Any:
        out = tile((4, 4), value=7.0)
        nisa.dma_copy(dst=out, src=x.vector_select(0, load(i)), oob_mode=nisa.oob_mode.skip)
        return store(out)

    result = execute(body, data, column([4, -1, 5, 0])).output
    np.testing.assert_array_equal(result, np.stack([data[4], np.full(4, 7.0), np.full(4, 7.0), data[0]]))


def test_rows_are_scattered_into_an_argument_which_the_caller_sees() -> None:
    cache, rows = np.zeros((6, 4), np.float32), random((3, 4))

    def body(c: Any, r: Any, i: Any) -> Any:
        nisa.dma_copy(dst=c.vector_select(0, load(i)), src=load(r), oob_mode=nisa.oob_mode.skip)
        return c

    result = execute(body, cache, rows, column([5, -1, 2]))
    expected = np.zeros((6, 4), np.float32)
    expected[5], expected[2] = rows[0], rows[2]
    np.testing.assert_array_equal(result.output, expected)
    np.testing.assert_array_equal(cache, expected)


def test_a_result_may_be_reshaped() -> None:
    result = execute(lambda a: store(load(a)).reshape((2, 3, 4)), random((6, 4))).output
    np.testing.assert_array_equal(result, random((6, 4)).reshape(2, 3, 4))


def test_both_cores_may_write_the_same_values_and_read_them() -> None:
    def body() -> Any:
        out = nl.ndarray((3, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        first = nl.program_id(0)
        nisa.dma_copy(dst=out[first : first + 2, :], src=tile((2, 4), value=3.0))
        nisa.dma_copy(dst=empty((1, 4)), src=out[1:2, :])
        return out

    assert (execute(body, grid=2).output == 3.0).all()


def test_a_gather_needs_no_data_without_arithmetic() -> None:
    def kernel(x: Any, i: Any) -> Any:
        out = empty((4, 6))
        nisa.dma_copy(dst=out, src=x.vector_select(0, load(i)))
        return store(out)

    specs = TensorSpec((20, 6), "float32"), TensorSpec((4, 1), "int32")
    assert run(jit(kernel), *specs, options=Options(arithmetic=False)).instructions

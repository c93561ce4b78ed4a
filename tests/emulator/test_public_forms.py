"""Forms of AWS's nki-library, one at a time: names, classes, and what the device takes where pages say little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from nki_emulator import RuleError, installed, rules
from nki_emulator import isa as nisa
from nki_emulator import language as nl

from tests.emulator.support import P, empty, execute, load, random, store, tile


def test_names_of_the_generation_the_sizes_and_the_types() -> None:
    assert nisa.get_nc_version() == nisa.nc_version.gen3 > nisa.nc_version.gen2
    assert nl.tile_size.psum_fmax == 512
    assert nl.tile_size.total_available_sbuf_size == nl.tile_size.sbuf_fmax_bytes
    with installed():
        import nki  # type: ignore[import-not-found]

        assert isinstance(nl.bfloat16, nki.dtype)


@dataclass
class Section(nl.NKIObject):
    """Without annotations, as public kernels have them."""

    first = None
    size = 4


class Options(nl.NKIObject):
    """Without the decorator."""

    fast: bool
    rows: int = 3


def test_classes_need_neither_annotations_nor_the_decorator() -> None:
    section = Section(first=2)
    assert (section.first, section.size) == (2, 4)
    options = Options(fast=True)
    assert (options.fast, options.rows) == (True, 3)
    with pytest.raises(TypeError, match="Options has no field 'quick'"):
        Options(quick=True)


@pytest.mark.parametrize(("offset", "moved"), [(2, True), (4, False), (-1000000, False)])
@pytest.mark.parametrize("side", ["read", "write"])
def test_a_scalar_offset_outside_is_skipped_as_a_whole(side: str, offset: int, moved: bool) -> None:
    rows = random((4, 3))

    def body(a: Any, i: Any) -> Any:
        index, chosen = load(i), a.ap([[3, 1], [1, 3]], scalar_offset=load(i), indirect_dim=0)
        assert index.shape == (1, 1)
        if side == "read":
            out = tile((1, 3), value=7.0)
            nisa.dma_copy(dst=out, src=chosen, oob_mode=nisa.oob_mode.skip)
            return store(out)
        nisa.dma_copy(dst=chosen, src=tile((1, 3), value=7.0), oob_mode=nisa.oob_mode.skip)
        return a

    result = execute(body, rows.copy(), np.array([[offset]], np.int32)).output
    if side == "read":
        np.testing.assert_array_equal(result[0], rows[2] if moved else np.full(3, 7.0))
    else:
        expected = rows.copy()
        expected[2 if moved else 0 : 3 if moved else 0] = 7.0
        np.testing.assert_array_equal(result, expected)


def test_what_a_skipped_copy_left_is_not_written() -> None:
    def body(a: Any) -> Any:
        out, index = empty((1, 3)), tile((1, 1), nl.int32, value=9)
        nisa.dma_copy(dst=out, src=a.ap([[3, 1], [1, 3]], scalar_offset=index), oob_mode=nisa.oob_mode.skip)
        return store(out)

    with pytest.raises(RuleError) as caught:
        execute(body, random((4, 3)))
    assert caught.value.rule is rules.UNWRITTEN_READ


def test_a_matmul_that_decides_for_itself_may_find_zeros() -> None:
    a, b = random((P, 8)), random((P, 16), 1)

    def body(x: Any, y: Any) -> Any:
        total = tile((8, 16), buffer=nl.psum, value=0)
        for _ in range(2):
            nisa.nc_matmul(dst=total, stationary=load(x), moving=load(y))
        return store(total)

    np.testing.assert_allclose(execute(body, a, b).output, 2 * (a.T @ b), rtol=1e-4, atol=1e-4)


def test_a_matmul_that_decides_for_itself_in_a_loop_has_a_tile_of_the_trip() -> None:
    a, b = random((P, 8)), random((P, 16), 1)

    def body(x: Any, y: Any) -> Any:
        left, right, out = load(x), load(y), empty((8, 16))

        def trip(_index: Any) -> None:
            total = empty((8, 16), buffer=nl.psum)
            for _ in range(2):
                nisa.nc_matmul(dst=total, stationary=left, moving=right)
            nisa.tensor_copy(dst=out, src=total)

        nl.fori_loop(0, 3, trip)
        return store(out)

    np.testing.assert_allclose(execute(body, a, b).output, 2 * (a.T @ b), rtol=1e-4, atol=1e-4)


def test_a_value_that_is_searched_more_often_than_it_stands_there_gives_its_first_place() -> None:
    data = random((P, 16))
    largest = np.repeat(data.max(axis=1, keepdims=True), 8, axis=1)

    def body(x: Any, y: Any) -> Any:
        places = empty((P, 8), nl.uint32)
        nisa.nc_find_index8(dst=places, data=load(x), vals=load(y))
        return store(places)

    np.testing.assert_array_equal(execute(body, data, largest).output[:, 0], data.argmax(axis=1))


def test_a_row_may_be_scattered_to_twice_with_the_same_values() -> None:
    cache = np.zeros((4, 3), np.float32)

    def body(c: Any, r: Any, i: Any) -> Any:
        nisa.dma_copy(dst=c.vector_select(0, load(i)), src=load(r))
        return c

    rows = np.array([[1, 2, 3], [4, 5, 6], [4, 5, 6]], np.float32)
    result = execute(body, cache, rows, np.array([[3], [0], [0]], np.int32)).output
    np.testing.assert_array_equal(result, [[4, 5, 6], [0, 0, 0], [0, 0, 0], [1, 2, 3]])


def test_modes_by_the_number_that_public_kernels_pass() -> None:
    def body(x: Any) -> Any:
        out = empty((4, 3))
        nisa.dma_copy(dst=out, src=x, dge_mode=3)
        return store(out)

    result = execute(body, random((4, 3)))
    assert result.instructions is not None
    assert result.instructions[0].flag("dge") == "none"


def test_cores_exchange_tiles_by_gpsimd() -> None:
    def body(x: Any) -> Any:
        out = nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        mine, other = nl.program_id(0), 1 - nl.program_id(0)
        given, taken = load(x[mine : mine + 1, :]), empty((1, 8))
        nisa.sendrecv(given, taken, other, other, 0, dma_engine=nisa.dma_engine.gpsimd_dma)
        nisa.dma_copy(dst=out[mine : mine + 1, :], src=taken)
        return out

    data = random((2, 8))
    result = execute(body, data, grid=2)
    np.testing.assert_array_equal(result.output, data[::-1])
    assert {i.engine for i in result.instructions or () if i.op == "sendrecv"} == {"gpsimd"}


def test_the_older_form_of_a_dynamic_loop() -> None:
    values = random((3, 4, 8))

    def body(a: Any, n: Any) -> Any:
        out = nl.ndarray((3, 4, 8), dtype=a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=a)
        trips = nisa.register_alloc()
        nisa.register_load(trips, n)
        for i in nl.dynamic_range(0, trips):
            row = tile((4, 8), value=7.0)
            nisa.dma_copy(dst=out.select(0, i), src=row)
        return out

    result = execute(body, values, np.array([[2]], np.int32))
    np.testing.assert_array_equal(result.output, np.concatenate([np.full((2, 4, 8), 7.0), values[2:]]))
    assert result.instructions is not None
    assert {i.loops for i in result.instructions if i.op == "memset"} == {(0,), (1,)}


def test_the_least_number_may_be_given_to_eight_digits() -> None:
    def body(x: Any) -> Any:
        out, bound = empty((4, 8)), tile((4, 1), value=2.0)
        nisa.range_select(
            dst=out, on_true_tile=load(x), comp_op0=nl.greater_equal, comp_op1=nl.less_equal, bound0=bound,
            bound1=bound, on_false_value=-3.4028235e38,
        )  # fmt: skip
        return store(out)

    data = random((4, 8))
    expected = np.where(np.arange(8) == 2, data, np.finfo(np.float32).min)
    np.testing.assert_array_equal(execute(body, data).output, expected)

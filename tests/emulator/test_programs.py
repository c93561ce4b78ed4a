"""Grids, shared memory, barriers, registers, dynamic loops, capacity and runs without arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nki_emulator import EmulatorError, Options, RuleError, TensorSpec, count, rules, run
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.jit import jit

from tests.emulator.support import P, empty, execute, load, random, store, tile

RECORD_ONLY = Options(arithmetic=False)


def halves(a: Any) -> Any:
    """Each program doubles its half of the columns."""
    n = a.shape[1] // nl.num_programs(axes=0)
    first = nl.program_id(axis=0) * n
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    part = empty((a.shape[0], n))
    nisa.dma_copy(dst=part, src=a[:, first : first + n])
    nisa.tensor_scalar(dst=part, data=part, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out[:, first : first + n], src=part)
    return out


@pytest.mark.parametrize("grid", [None, 1, 2])
def test_programs_share_one_result(grid: int | None) -> None:
    values = random((P, 32))
    result = execute(halves, values, grid=grid)
    np.testing.assert_array_equal(result.output, values * 2)
    assert {i.program for i in result.instructions} == set(range(grid or 1))


def test_program_ndim_tells_a_launch_without_grid() -> None:
    seen = []
    for grid in (None, 1, 2):
        execute(lambda: seen.append(nl.program_ndim()), grid=grid)
    assert seen == [0, 1, 1, 1]


def test_a_barrier_makes_the_other_cores_writes_visible() -> None:
    def body(a: Any) -> Any:
        mine = nl.program_id(0)
        scratch = nl.ndarray((2, 8), dtype=a.dtype, buffer=nl.shared_hbm, name="scratch")
        out = nl.ndarray((2, 8), dtype=a.dtype, buffer=nl.shared_hbm)
        row = empty((1, 8))
        nisa.dma_copy(dst=row, src=a[mine : mine + 1, :])
        nisa.dma_copy(dst=scratch[mine : mine + 1, :], src=row)
        nisa.core_barrier(data=scratch, cores=(0, 1))
        other = empty((1, 8))
        nisa.dma_copy(dst=other, src=scratch[1 - mine : 2 - mine, :])
        nisa.dma_copy(dst=out[mine : mine + 1, :], src=other)
        return out

    values = random((2, 8))
    np.testing.assert_array_equal(execute(body, values, grid=2).output, values[::-1])


def test_an_error_in_one_program_ends_the_other_at_its_barrier() -> None:
    def body(a: Any) -> None:
        if nl.program_id(0) == 1:
            a[:, 99]
        nisa.core_barrier(data=a, cores=(0, 1))

    with pytest.raises(RuleError) as caught:
        execute(body, random((2, 8)), grid=2)
    assert caught.value.rule is rules.INDEX_RANGE


def test_several_results_and_static_arguments() -> None:
    @jit
    def kernel(a: Any, factor: float, names: tuple[str, ...] = ("x",)) -> Any:
        t = load(a)
        nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=factor)
        assert names == ("x",)
        return store(t), store(load(a))

    values = random((4, 4))
    doubled, same = run(kernel, values, 2.0).outputs
    np.testing.assert_array_equal(doubled, values * 2)
    np.testing.assert_array_equal(same, values)
    with pytest.raises(EmulatorError, match="2 results"):
        _ = run(kernel, values, factor=2.0).output


def test_calling_a_kernel_returns_its_arrays() -> None:
    values = random((P, 32))
    np.testing.assert_array_equal(jit(halves)[2](values), values * 2)


# Registers and loops


def gated(a: Any, flag: Any) -> Any:
    """Zeros unless flag is 1; then a copy of a."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile(a.shape, value=0.0))
    gate = load(flag)
    nisa.tensor_scalar(dst=gate, data=gate, op0=nl.equal, operand0=1)
    trips = nisa.register_alloc()
    nisa.register_load(trips, gate)

    def body(i: Any) -> None:
        nisa.dma_copy(dst=out, src=load(a))

    nl.fori_loop(0, trips, body)
    return out


@pytest.mark.parametrize(("flag", "open_"), [(0, 0), (1, 1), (5, 0), (-1, 0)])
def test_a_loop_of_no_or_one_trip_gates_work(flag: int, open_: int) -> None:
    values = random((4, 8))
    result = execute(gated, values, np.array([[flag]], np.int32))
    np.testing.assert_array_equal(result.output, values * open_)
    assert sum(bool(i.loops) for i in result.instructions) == 2 * open_


def test_a_loop_index_selects_and_offsets() -> None:
    values = random((4, 3, 8))

    def body(a: Any) -> Any:
        t, out = load(a), nl.ndarray((3, 4, 8), dtype=a.dtype, buffer=nl.shared_hbm)

        def trip(i: Any) -> None:
            row = empty((4, 8))
            nisa.tensor_copy(dst=row, src=t.select(1, i))
            nisa.dma_copy(dst=out.ap(pattern=[[8, 4], [1, 8]], scalar_offset=i, indirect_dim=0), src=row)

        nl.fori_loop(0, 3, trip)
        return out

    result = execute(body, values)
    np.testing.assert_array_equal(result.output, values.transpose(1, 0, 2))
    assert all(i.flag("dynamic") == "True" for i in result.instructions if i.op == "tensor_copy")


def test_a_tile_can_be_the_offset() -> None:
    values = random((4, 3, 8))

    def body(a: Any) -> Any:
        index, row = tile((1, 1), nl.uint32, value=2), empty((4, 8))
        nisa.tensor_copy(dst=row, src=load(a).select(1, index))
        return store(row)

    np.testing.assert_array_equal(execute(body, values).output, values[:, 2])


def test_while_loop_runs_until_its_register_is_zero() -> None:
    def body(a: Any) -> Any:
        left, total = load(a), tile((1, 1), nl.int32, value=0)

        def trip(r: Any) -> Any:
            nisa.tensor_scalar(dst=left, data=left, op0=nl.subtract, operand0=1)
            nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=10)
            nisa.register_load(r, left)
            return r

        pending = nisa.register_alloc()
        nisa.register_load(pending, left)
        nl.while_loop(pending, trip)
        return store(total)

    for trips in (0, 1, 4):
        assert execute(body, np.array([[trips]], np.int32)).output == 10 * trips


def test_registers_move_and_store() -> None:
    def body() -> Any:
        a, b = nisa.register_alloc(7), nisa.register_alloc()
        nisa.register_move(b, a)
        out = empty((1, 1), nl.int32)
        nisa.register_store(out, b)
        return store(out)

    assert execute(body).output == 7


# Memory


def test_tiles_take_memory_from_their_first_use_to_their_last_whatever_names_them() -> None:
    def body() -> None:
        kept = []
        for _ in range(20):
            a, b = empty((P, 512), buffer=nl.psum), empty((P, 10_000))
            nisa.memset(dst=a, value=0.0)
            nisa.tensor_copy(dst=b[:, 0:512], src=a)
            kept.append((a, b))

    result = execute(body)
    assert result.psum_peak == 1
    assert result.sbuf_peak == 40_000


def test_tiles_of_a_loop_are_live_for_all_of_it_and_are_the_same_in_every_trip() -> None:
    def body() -> None:
        outside = tile((P, 512), buffer=nl.psum)

        def trip(i: Any) -> None:
            nisa.tensor_copy(dst=outside, src=outside)
            for _ in range(6):
                nisa.memset(dst=empty((P, 512), buffer=nl.psum), value=0.0)

        nl.fori_loop(0, 3, trip)

    assert execute(body).psum_peak == 7


def test_the_tile_of_an_offset_is_in_use() -> None:
    def body(a: Any) -> Any:
        index, row = tile((1, 1), nl.uint32, value=1), empty((4, 8))
        nisa.memset(dst=empty((4, 8)), value=0.0)
        nisa.tensor_copy(dst=row, src=load(a).select(1, index))
        return store(row)

    assert execute(body, random((4, 3, 8))).sbuf_peak == 32 + 96 + 32


def test_small_tiles_count_whole_lines_and_banks() -> None:
    def body() -> None:
        nisa.tensor_copy(dst=tile((P, 1)), src=tile((P, 1), buffer=nl.psum))
        nisa.tensor_copy(dst=empty((P, 1)), src=tile((P, 1)))

    result = execute(body)
    assert (result.sbuf_peak, result.psum_peak) == (32 + 32, 1)


# Without arithmetic


def test_a_run_without_arithmetic_records_the_same_instructions() -> None:
    values = random((P, 64))
    full = execute(halves, values, grid=2)
    recorded = execute(halves, TensorSpec((P, 64), "float32"), grid=2, options=RECORD_ONLY)
    assert recorded.instructions == full.instructions
    assert recorded.output.size == 0


def test_a_run_without_arithmetic_still_checks() -> None:
    def body() -> None:
        nisa.tensor_copy(dst=empty((P, 4)), src=empty((P, 4)))

    with pytest.raises(RuleError) as caught:
        execute(body, options=RECORD_ONLY)
    assert caught.value.rule is rules.UNWRITTEN_READ


def test_a_run_without_arithmetic_is_told_what_registers_hold() -> None:
    specs = TensorSpec((4, 8), "float32"), TensorSpec((1, 1), "int32")
    with pytest.raises(EmulatorError, match="loaded_register"):
        execute(gated, *specs, options=RECORD_ONLY)
    for trips in (0, 1):
        result = execute(gated, *specs, options=Options(arithmetic=False, loaded_register=trips))
        assert count(result.instructions, "dma_copy") == 2 + 2 * trips


def test_specs_need_a_run_without_arithmetic() -> None:
    with pytest.raises(EmulatorError, match="no data"):
        execute(halves, TensorSpec((P, 64), "float32"))


def test_constants_are_made_once_even_inside_a_loop() -> None:
    def body(a: Any) -> Any:
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)

        def trip(i: Any) -> None:
            nisa.dma_copy(dst=out, src=nl.shared_identity_matrix(4, dtype=nl.float32))

        nl.fori_loop(0, 2, trip)
        nisa.dma_copy(dst=out, src=nl.shared_identity_matrix(4, dtype=nl.float32))
        return out

    result = execute(body, random((4, 4)))
    np.testing.assert_array_equal(result.output, np.eye(4))
    assert count(result.instructions, "shared_identity_matrix") == 1

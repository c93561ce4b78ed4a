"""Arguments, results, grids and the two cores."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from nki_emulator import Options, TensorSpec, rules, run
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.jit import jit

from tests.emulator.broken_rules import breaks, breaks_launch
from tests.emulator.support import P, empty, execute, store, tile


@breaks_launch(rules.KERNEL_ARGUMENTS, "kernel", "a")
def set_argument() -> None:
    execute(lambda a: None, {1, 2})


@breaks_launch(rules.KERNEL_ARGUMENTS, "keyword_only", "n")
def keyword_only_parameter() -> None:
    def keyword_only(*, n: int) -> None: ...

    jit(keyword_only)


@breaks_launch(rules.READ_ONLY_ARGUMENT, "dma_copy", "dst")
def write_to_a_constant_argument() -> None:
    constant = np.zeros((4, 4), np.float32)
    constant.flags.writeable = False
    execute(lambda a: nisa.dma_copy(dst=a, src=tile((4, 4))), constant)


@breaks_launch(rules.NO_FN_TENSOR, "kernel", "a")
def fn_argument() -> None:
    execute(lambda a: None, np.zeros((4, 4), ml_dtypes.float8_e4m3fn))


@breaks(rules.RESULT, "kernel", "result 0")
def private_result() -> Any:
    out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.hbm)
    nisa.dma_copy(dst=out, src=tile((4, 4)))
    return out


@breaks(rules.RESULT, "kernel", "result 0")
def view_as_a_result() -> Any:
    return store(tile((4, 4)))[0:2, :]


@breaks_launch(rules.RESULT, "kernel", "result 0")
def part_of_an_argument_as_a_result() -> None:
    execute(lambda a: a[0:2, :], np.zeros((4, 4), np.float32))


@breaks(rules.RESULT_UNWRITTEN, "kernel", "result 0")
def half_written_result() -> Any:
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0:4, :], src=tile((4, 4)))
    return out


@breaks_launch(rules.DISJOINT_WRITES, "dma_copy", "dst")
def both_cores_write_one_row() -> None:
    def body() -> Any:
        out = nl.ndarray((3, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        first = nl.program_id(0)
        nisa.dma_copy(dst=out[first : first + 2, :], src=tile((2, 4), value=1.0 + first))
        return out

    execute(body, grid=2)


@breaks_launch(rules.CROSS_CORE_READ, "dma_copy", "src")
def read_of_the_other_core() -> None:
    def body() -> Any:
        out = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        mine = nl.program_id(0)
        nisa.dma_copy(dst=out[mine : mine + 1, :], src=tile((1, 4)))
        if mine == 1:
            nisa.dma_copy(dst=empty((1, 4)), src=out[0:1, :])
        return out

    execute(body, grid=2)


@breaks_launch(rules.GRID, "kernel", "grid")
def three_programs() -> None:
    execute(lambda: None, grid=3)


@breaks(rules.GRID, "nl.program_id", "axis")
def second_grid_axis() -> None:
    nl.program_id(1)


@breaks_launch(rules.SAME_STRUCTURE, "nl.ndarray")
def programs_allocate_different_results() -> None:
    def body() -> Any:
        out = nl.ndarray((4 + nl.program_id(0), 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile(out.shape))
        return out

    execute(body, grid=2)


@breaks_launch(rules.SAME_STRUCTURE, "kernel", "results")
def programs_return_different_results() -> None:
    def body() -> Any:
        outs = [nl.ndarray((1, 4), dtype=nl.float32, buffer=nl.shared_hbm) for _ in range(2)]
        mine = nl.program_id(0)
        nisa.dma_copy(dst=outs[mine], src=tile((1, 4)))
        return outs[mine]

    execute(body, grid=2)


@breaks_launch(rules.SAME_CONTROL_FLOW, "kernel")
def different_trip_counts() -> None:
    def body() -> None:
        nl.fori_loop(0, 1 + nl.program_id(0), lambda i: None)

    execute(body, grid=2)


@breaks_launch(rules.CORE_BARRIER, "kernel")
def barrier_on_one_core() -> None:
    def body(a: Any) -> None:
        if nl.program_id(0) == 0:
            nisa.core_barrier(data=a, cores=(0, 1))

    execute(body, np.zeros((4, 4), np.float32), grid=2)


@breaks_launch(rules.CORE_BARRIER, "core_barrier", "cores")
def barrier_without_a_second_core() -> None:
    execute(lambda a: nisa.core_barrier(data=a, cores=(0, 1)), np.zeros((4, 4), np.float32))


@breaks_launch(rules.IDLE_PROGRAM, "kernel")
def one_core_with_nothing_to_do() -> None:
    def kernel() -> Any:
        out = nl.ndarray((1, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=out, src=tile((1, 4)))
        return out

    run(jit(kernel), grid=2)


def exchanging(size: int, pipe: int) -> None:
    """sendrecv of a tile whose size, or over a pipe whose number, differs between the programs."""

    def body() -> None:
        mine = nl.program_id(0)
        src, dst = tile((P, 4 + mine * size)), empty((P, 4 + mine * size))
        nisa.sendrecv(src=src, dst=dst, send_to_rank=1 - mine, recv_from_rank=1 - mine, pipe_id=mine * pipe)

    execute(body, grid=2)


@breaks_launch(rules.SENDRECV, "kernel")
def exchange_of_different_tiles() -> None:
    exchanging(size=1, pipe=0)


@breaks_launch(rules.SENDRECV, "kernel")
def exchange_over_different_pipes() -> None:
    exchanging(size=0, pipe=1)


@breaks(rules.SENDRECV, "sendrecv", "send_to_rank")
def exchange_of_one_core() -> None:
    nisa.sendrecv(src=tile((P, 4)), dst=empty((P, 4)), send_to_rank=1, recv_from_rank=1, pipe_id=0)


@breaks(rules.SHARED_NAME, "kernel")
def nameless_shared_scratch() -> None:
    nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)


@breaks_launch(rules.NOT_MODELLED, "nki.jit")
def options_of_jit() -> None:
    jit(cache=False)


@breaks_launch(rules.DTYPE, "kernel", "a")
def specification_of_an_unknown_type() -> None:
    execute(lambda a: None, TensorSpec((4, 4), "float64"), options=Options(arithmetic=False))


@breaks_launch(rules.CONSTANT, "kernel", "a")
def wide_integer_argument() -> None:
    execute(lambda a: None, 2**31)


@breaks(rules.RESULT, "kernel", "result 0")
def number_as_a_result() -> Any:
    return 1


@breaks(rules.GRID, "nl.num_programs", "axes")
def size_of_a_second_grid_axis() -> None:
    nl.num_programs(1)


@breaks_launch(rules.NOT_MODELLED, "core_barrier")
def barrier_in_a_dynamic_loop() -> None:
    def body(a: Any) -> None:
        nl.fori_loop(0, 1, lambda i: nisa.core_barrier(data=a, cores=(0, 1)))

    execute(body, np.zeros((4, 4), np.float32), grid=2)

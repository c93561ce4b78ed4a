"""The instruction record and the cost model: each figure is checked on an instruction worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nki_emulator import Instruction, cost, count
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.isa import dge_mode, engine

from tests.emulator.support import P, empty, execute, load, random, store, tile


def last(body: Any, *arrays: Any, op: str) -> Instruction:
    """The last instruction of name `op` that a body issues."""
    return [i for i in execute(body, *arrays).instructions if i.op == op][-1]


def cycles(body: Any, op: str, *arrays: Any) -> float:
    """Modelled cycles of the last instruction `op`, on the only engine it uses."""
    instruction = last(body, *arrays, op=op)
    ((name, seconds),) = cost.busy_seconds(instruction).items()
    assert name == instruction.engine
    return round(seconds * cost.HERTZ[name], 6)


# Record


def test_an_instruction_says_who_did_what_where() -> None:
    def body() -> None:
        data, out = tile((64, 4, 8), nl.bfloat16), empty((64, 4, 8))
        nisa.tensor_scalar(dst=out, data=data, op0=nl.multiply, operand0=tile((64, 1)), engine=engine.scalar)

    instruction = last(body, op="tensor_scalar")
    assert (instruction.op, instruction.engine, instruction.program) == ("tensor_scalar", "scalar", 0)
    assert (instruction.elements, instruction.loops) == (32, ())
    assert instruction.flag("alu") == "multiply"
    assert "test_record.py" in instruction.location
    dst, data, operand = (instruction.operand(role) for role in ("dst", "data", "operand0"))
    assert (dst.dtype, dst.buffer, dst.partitions, dst.elements, dst.bytes) == ("float32", "sbuf", 64, 32, 8192)
    assert (data.dtype, data.shape, data.run_bytes, data.inner_step) == ("bfloat16", (64, 4, 8), 64, 1)
    assert (operand.elements, operand.bytes) == (1, 256)
    with pytest.raises(KeyError, match="data2"):
        instruction.operand("data2")


def test_a_matmul_records_its_sizes_and_whether_it_adds() -> None:
    def body() -> None:
        a, b, out = tile((P, 16)), tile((P, 64)), empty((16, 64), buffer=nl.psum)
        for k in range(2):
            nisa.nc_matmul(dst=out, stationary=a, moving=b, accumulate=k > 0)

    instruction = last(body, op="nc_matmul")
    flags = {name: instruction.flag(name) for name in ("K", "M", "N", "accumulate", "transpose")}
    assert flags == {"K": "128", "M": "16", "N": "64", "accumulate": "True", "transpose": "False"}


def test_count_counts_over_programs() -> None:
    def body() -> Any:
        out = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        mine = nl.program_id(0)
        nisa.dma_copy(dst=out[mine : mine + 1, :], src=tile((1, 4)))
        return out

    instructions = execute(body, grid=2).instructions
    assert (count(instructions, "memset"), count(instructions, "nc_matmul")) == (2, 0)


def test_a_strided_dma_records_its_runs() -> None:
    def body(a: Any) -> Any:
        t = empty((P, 32))
        nisa.dma_copy(dst=t, src=a[:, 0:32])
        return store(t)

    source = next(i for i in execute(body, random((P, 64))).instructions if i.op == "dma_copy").operand("src")
    assert (source.partitions, source.elements, source.run_bytes) == (1, P * 32, 128)


def test_instructions_are_frozen_and_hashable() -> None:
    instruction = last(lambda: None, op="memset")
    assert hash(instruction) == hash(instruction)
    with pytest.raises(AttributeError):
        instruction.op = "other"  # type: ignore[misc]


# TensorE


@pytest.mark.parametrize(("n", "expected"), [(1, 64), (64, 64), (512, 512)])
def test_matmul_streams_n_columns_and_at_least_64(n: int, expected: int) -> None:
    def body(dtype: Any) -> Any:
        def run() -> None:
            out = empty((P, n), buffer=nl.psum)
            nisa.nc_matmul(dst=out, stationary=tile((P, P), dtype), moving=tile((P, n), dtype))

        return run

    assert cycles(body(nl.bfloat16), "nc_matmul") == expected
    assert cycles(body(nl.float32), "nc_matmul") == 4 * expected


def test_row_tiles_run_side_by_side() -> None:
    def body() -> None:
        t, out = tile((32, 64), nl.bfloat16), empty((64, 64), buffer=nl.psum)
        nisa.nc_matmul(dst=out, stationary=t, moving=t, tile_position=(0, 0), tile_size=(32, 128))

    assert cycles(body, "nc_matmul") == 16


def test_zero_one_hint_and_transposes_halve_fp32() -> None:
    def hinted() -> None:
        out, t = empty((P, P), buffer=nl.psum), tile((P, P))
        nisa.nc_matmul(dst=out, stationary=t, moving=t, is_moving_onezero=True)

    def transposed(dtype: Any) -> Any:
        def run() -> None:
            nisa.nc_transpose(dst=empty((P, P), dtype, nl.psum), data=tile((P, P), dtype))

        return run

    assert cycles(hinted, "nc_matmul") == 256
    assert cycles(transposed(nl.float32), "nc_transpose") == 256
    assert cycles(transposed(nl.bfloat16), "nc_transpose") == 128


# VectorE, ScalarE, GpSimd


def copy_cycles(dst: Any, src: Any, step: int = 1, src_buffer: Any = nl.sbuf, dst_buffer: Any = nl.sbuf) -> float:
    def body() -> None:
        data = tile((P, 512 * step), src, src_buffer)[:, 0 : 512 * step : step]
        nisa.tensor_copy(dst=empty((P, 512), dst, dst_buffer), src=data)

    return cycles(body, "tensor_copy")


def test_performance_modes_of_vector_copies() -> None:
    assert copy_cycles(nl.bfloat16, nl.bfloat16) == 128
    assert copy_cycles(nl.bfloat16, nl.float16, step=2) == 256
    assert copy_cycles(nl.bfloat16, nl.bfloat16, src_buffer=nl.psum) == 256
    assert copy_cycles(nl.bfloat16, nl.bfloat16, src_buffer=nl.psum, dst_buffer=nl.psum) == 512
    assert copy_cycles(nl.bfloat16, nl.float32) == 512
    assert copy_cycles(nl.bfloat16, nl.uint8) == 512


def test_two_input_operations_cost_double_unless_one_input_is_in_psum_or_all_are_bf16() -> None:
    def tensors(dtype: Any, buffer: Any) -> Any:
        def body() -> None:
            a, b = tile((P, 512), dtype, buffer), tile((P, 512), dtype)
            nisa.tensor_tensor(dst=empty((P, 512), dtype), data1=a, data2=b, op=nl.multiply)

        return body

    def scaled(buffer: Any) -> Any:
        def body() -> None:
            a, b, s = tile((P, 512), buffer=buffer), tile((P, 512)), tile((P, 1))
            nisa.scalar_tensor_tensor(dst=b, data=a, op0=nl.multiply, operand0=s, op1=nl.add, operand1=b)

        return body

    assert cycles(tensors(nl.float32, nl.sbuf), "tensor_tensor") == 1024
    assert cycles(tensors(nl.float32, nl.psum), "tensor_tensor") == 512
    assert cycles(tensors(nl.bfloat16, nl.sbuf), "tensor_tensor") == 512
    assert cycles(scaled(nl.sbuf), "scalar_tensor_tensor") == 1024
    assert cycles(scaled(nl.psum), "scalar_tensor_tensor") == 512


def test_small_instructions_cost_64_cycles_and_some_cost_more() -> None:
    small, scalars = (lambda: tile((P, 4))), (lambda: empty((P, 1)))
    assert cycles(lambda: nisa.memset(dst=empty((P, 1)), value=0.0), "memset") == 64
    assert cycles(lambda: nisa.reciprocal(dst=empty((P, 32)), data=tile((P, 32))), "reciprocal") == 256
    assert cycles(lambda: nisa.activation(dst=small(), op=nl.exp, data=small()), "activation") == 64
    assert (
        cycles(
            lambda: nisa.activation_reduce(
                dst=small(), op=nl.copy, data=small(), reduce_op=nl.add, reduce_res=scalars()
            ),
            "activation",
        )
        == 128
    )
    assert (
        cycles(
            lambda: nisa.tensor_scalar_reduce(
                dst=small(), data=small(), op0=nl.abs, operand0=0.0, reduce_op=nl.maximum, reduce_res=scalars()
            ),
            "tensor_scalar_reduce",
        )
        == 128
    )
    assert cycles(lambda: nisa.iota(dst=empty((P, 50), nl.int32), pattern=[[1, 50]]), "iota") == 200


def test_a_run_time_offset_costs_600_cycles() -> None:
    def body() -> None:
        nisa.tensor_copy(dst=empty((P, 4)), src=tile((P, 2, 4)).select(1, nisa.register_alloc(1)))

    assert cycles(body, "tensor_copy") == 664


@pytest.mark.parametrize(
    ("columns", "step", "expected"),
    [(512, 1, 512), (512, 8, 512), (512, 9, 1024), (40, 9, 80), (24, 9, 64)],  # 8 bf16 elements are 16 bytes
)
def test_a_moving_operand_of_wide_steps_streams_at_half_the_rate_at_worst(
    columns: int, step: int, expected: int
) -> None:
    def body() -> None:
        moving = tile((P, columns, step), nl.bfloat16)[:, :, 0]
        total = empty((P, columns), buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=tile((P, P), nl.bfloat16), moving=moving)

    (matmul,) = (i for i in execute(body).instructions if i.op == "nc_matmul")
    assert cost.busy_seconds(matmul)["tensor"] * 2.4e9 == pytest.approx(max(columns, 64))
    assert cost.busy_seconds(matmul, cost.PESSIMISTIC)["tensor"] * 2.4e9 == pytest.approx(expected)


# DMA


def test_dma_time_is_bytes_over_bandwidth_plus_packets() -> None:
    def body(a: Any) -> Any:
        return store(load(a))

    transfer = execute(body, np.zeros((P, 1024), np.float32)).instructions[0]
    busy = cost.busy_seconds(transfer)
    assert busy["dma"] == pytest.approx(P * 4096 / 368e9 + P * 20e-9 / 16)
    assert busy["hbm"] == pytest.approx(P * 4096 / 362.5e9)
    assert set(busy) == {"dma", "hbm"}


def test_small_runs_waste_dma_bandwidth() -> None:
    def rate(width: int) -> float:
        transfer = execute(lambda a: store(load(a)), np.zeros((P, width), np.uint8)).instructions[0]
        return P * width / cost.busy_seconds(transfer)["dma"]

    assert rate(128) < 0.25 * rate(8192)
    assert 0.9 * 368e9 < rate(8192) < 368e9
    assert rate(2048) > 0.75 * rate(8192)


def test_hardware_descriptors_occupy_their_queue() -> None:
    def body(queue: Any) -> Any:
        def run(a: Any) -> Any:
            t = empty(a.shape)
            nisa.dma_copy(dst=t, src=a, dge_mode=dge_mode.hwdge, engine=queue)
            return store(t)

        return run

    for queue, name in ((engine.sync, "sync"), (engine.scalar, "scalar"), (engine.unknown, "sync")):
        transfer = execute(body(queue), random((P, 8))).instructions[0]
        assert cost.busy_seconds(transfer)[name] == pytest.approx(0.6e-6)


# Kernels


def test_the_busiest_engine_of_the_slowest_program_bounds_a_kernel() -> None:
    def body() -> None:
        t = tile((P, 512))
        for _ in range(10 * (1 + nl.program_id(0))):
            nisa.activation(dst=t, op=nl.exp, data=t)

    result = cost.kernel_cost(execute(body, grid=2).instructions)
    assert result.bound_by == "scalar"
    assert result.bound == pytest.approx(20 * 512 / 1.2e9)
    assert [program.seconds["scalar"] for program in result.programs] == pytest.approx([result.bound / 2, result.bound])
    assert set(result.programs[0].seconds) == set(cost.ENGINES)


def test_the_floor_reads_every_byte_once() -> None:
    assert cost.hbm_floor(2 * 362_500, 2) == pytest.approx(1e-6)

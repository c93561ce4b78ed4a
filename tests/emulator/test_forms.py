"""Forms that kernels in the field use: views of many shapes, older names, arguments of every kind."""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki_emulator import installed, run, signatures
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.jit import jit
from nki_emulator.operators import ACTIVATIONS

from tests.emulator.support import P, empty, execute, load, on_tiles, random, store, tile


def test_dma_steps_farther_than_an_engine_can() -> None:
    data = np.random.default_rng(0).integers(0, 256, (2, 3, 40000)).astype(np.uint8)

    def body(x: Any) -> Any:
        out = empty((3, 2, 40000), nl.uint8)
        nisa.dma_copy(dst=out, src=x.permute((1, 0, 2)))
        return store(out[:, :, 0:4])

    np.testing.assert_array_equal(execute(body, data).output, data.transpose(1, 0, 2)[:, :, :4])


def test_a_shuffle_spreads_one_partition_and_works_in_place() -> None:
    data = random((32, 8))

    def body(x: Any) -> Any:
        loaded, spread = load(x), empty((32, 8))
        nisa.nc_stream_shuffle(dst=spread, src=loaded[0:1, :], shuffle_mask=[0] * 32)
        nisa.nc_stream_shuffle(dst=loaded, src=loaded, shuffle_mask=list(range(31, -1, -1)))
        return store(spread), store(loaded)

    spread, turned = execute(body, data).outputs
    np.testing.assert_array_equal(spread, np.broadcast_to(data[:1], (32, 8)))
    np.testing.assert_array_equal(turned, data[::-1])


def test_memset_takes_an_int_for_floats_and_rounds() -> None:
    def body() -> Any:
        both = tile((P, 2), nl.bfloat16, value=0)
        nisa.memset(dst=both[:, 1:2], value=1e-6)
        return store(both)

    result = execute(body).output
    assert result[0].tolist() == [0.0, ml_dtypes.bfloat16(1e-6)]


@pytest.mark.parametrize("form", ["tensor_tensor", "tensor_scalar", "scalar_tensor_tensor", "copy", "activation"])
def test_operands_of_equal_size_need_no_equal_shape(form: str) -> None:
    a, b = random((P, 4, 8)), random((P, 32), 1)

    def body(x: Any, y: Any) -> Any:
        out = empty((P, 8, 4))
        if form == "tensor_tensor":
            nisa.tensor_tensor(dst=out, data1=x, data2=y, op=nl.add)
        elif form == "tensor_scalar":
            nisa.tensor_scalar(dst=out, data=y, op0=nl.multiply, operand0=2.0)
        elif form == "scalar_tensor_tensor":
            nisa.scalar_tensor_tensor(dst=out, data=x, op0=nl.multiply, operand0=1.0, op1=nl.add, operand1=y)
        elif form == "copy":
            nisa.tensor_copy(dst=out, src=y)
        else:
            nisa.activation(dst=out, op=nl.copy, data=x)
        return out

    flat = a.reshape(P, 32)
    expected = {"tensor_scalar": 2 * b, "copy": b, "activation": flat}.get(form, flat + b)
    np.testing.assert_array_equal(on_tiles(body, a, b).reshape(P, 32), expected)


def test_a_pattern_of_a_view_addresses_the_whole_tensor_and_counts_its_rows() -> None:
    data = random((6, 8))

    def body(x: Any) -> Any:
        out, index = empty((2, 4)), tile((1, 1), nl.uint32, value=2)
        rows = x.reshape((3, 16))
        nisa.dma_copy(dst=out, src=rows.ap([[4, 2], [1, 4]], offset=4, scalar_offset=index))
        return store(out)

    np.testing.assert_array_equal(execute(body, data).output, data.reshape(-1)[36:44].reshape(2, 4))


def test_reductions_over_four_free_dimensions_and_into_their_own_data() -> None:
    data = random((P, 2, 3, 2, 5))

    def body(x: Any) -> Any:
        nisa.tensor_reduce(dst=x[:, 0:1, 0, 0, 0], op=nl.maximum, data=x.permute((0, 3, 2, 1, 4)), axis=(1, 2, 3, 4))
        out = empty((P, 1))
        nisa.tensor_copy(dst=out, src=x[:, 0:1, 0, 0, 0])
        return out

    np.testing.assert_array_equal(on_tiles(body, data)[:, 0], data.reshape(P, -1).max(axis=1))


def test_an_activation_may_discard_all_but_its_sum() -> None:
    data = random((P, 16))

    def body(x: Any) -> Any:
        scratch, total = empty((P, 1)), empty((P, 1))
        sums = {"reduce_op": nl.add, "reduce_res": total, "reduce_cmd": nisa.reduce_cmd.reset_reduce}
        nisa.activation(dst=scratch.broadcast(1, 16), op=nl.square, data=x, **sums)
        return total

    np.testing.assert_allclose(on_tiles(body, data)[:, 0], np.square(data).sum(axis=1), rtol=1e-6)


def test_column_tiles_of_a_matmul_write_their_own_partitions() -> None:
    a, b = random((P, 128)), random((P, 64), 1)

    def body(x: Any, y: Any) -> Any:
        out = empty((128, 64), buffer=nl.psum)
        for c in range(4):
            block = x[:, 32 * c : 32 * c + 32]
            nisa.nc_matmul(
                dst=out[32 * c : 32 * c + 32, :], stationary=block, moving=y, tile_position=(0, 32 * c),
                tile_size=(128, 32),
            )  # fmt: skip
        return out

    np.testing.assert_allclose(on_tiles(body, a, b), a.T @ b, rtol=1e-4, atol=1e-4)


DERIVATIVES = {"erf_dx": "erf", "gelu_dx": "gelu", "relu_dx": "relu", "tanh_dx": "tanh", "silu_dx": "silu"} | {
    "gelu_apprx_sigmoid_dx": "gelu_apprx_sigmoid"
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_those_of_their_functions(name: str) -> None:
    x = np.linspace(-3.05, 3.05, 40, dtype=np.float32)
    step = np.float32(2.0**-6)
    function = ACTIVATIONS[DERIVATIVES[name]].function
    slope = (function(x + step).astype(np.float64) - function(x - step)) / (2 * step)
    np.testing.assert_allclose(ACTIVATIONS[name].function(x), slope, atol=2e-3)


def test_gelu_and_its_approximations_agree() -> None:
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    exact = np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()])
    np.testing.assert_allclose(ACTIVATIONS["gelu"].function(x), exact, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(ACTIVATIONS["gelu_apprx_tanh"].function(x), exact, atol=1e-3)
    np.testing.assert_allclose(ACTIVATIONS["gelu_apprx_sigmoid"].function(x), exact, atol=3e-2)
    np.testing.assert_allclose(ACTIVATIONS["mish"].function(x), x * np.tanh(np.log1p(np.exp(x))), rtol=1e-5)


def test_views_by_other_arguments() -> None:
    def body(x: Any) -> Any:
        t = load(x)
        assert t.reshape_dim(1, (3, -1)).shape == (4, 3, 4)
        assert t.reshape_dim(1, (3, -1)).flatten_dims(start_dim=1, end_dim=2).shape == (4, 12)
        assert nl.broadcast_to(t[:, 0:1], (4, 5)).strides[1] == 0
        total = nl.sum(t, axis=1, keepdims=True)
        return store(total), store(nl.zeros((4, 2), nl.float32))

    data = random((4, 12))
    total, zeros = execute(body, data).outputs
    np.testing.assert_allclose(total[:, 0], data.sum(axis=1), rtol=1e-5)
    assert not zeros.any()


def test_older_names() -> None:
    assert nisa.vector_engine is nisa.engine.vector
    assert nl.affine_range(3) == nl.sequential_range(0, 3) == range(3)
    with installed():
        from nki.isa.constants import dge_mode  # type: ignore[import-not-found]

        assert dge_mode is nisa.dge_mode
    assert "nki.isa.constants" not in sys.modules


class Side(enum.Enum):
    LEFT = 1


@dataclass
class Config(nl.NKIObject):
    scale: float
    rows: Any


def test_arguments_of_every_kind() -> None:
    @jit(mode="trace")
    def kernel(xs: Any, side: Any, config: Any, dtype: Any) -> Any:
        assert side == Side.LEFT
        out = nl.ndarray(xs[0].shape, dtype=dtype, buffer=nl.shared_hbm)
        total = empty(xs[0].shape)
        nisa.tensor_tensor(dst=total, data1=load(xs[0]), data2=load(config.rows), op=nl.add)
        nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=config.scale)
        nisa.dma_copy(dst=out, src=total)
        return out

    a, b = random((4, 8)), random((4, 8), 1)
    np.testing.assert_array_equal(run(kernel, [a], Side.LEFT, Config(2.0, b), nl.float32).output, 2 * (a + b))


def test_a_kernel_may_call_another() -> None:
    @jit
    def doubled(x: Any) -> Any:
        t = load(x)
        nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=2.0)
        return store(t)

    data = random((4, 8))
    np.testing.assert_array_equal(execute(lambda x: doubled(x), data).output, 2 * data)


def test_bitvec_operands_may_be_tiles() -> None:
    data = np.arange(P * 4, dtype=np.int32).reshape(P, 4)
    amount = (np.arange(P, dtype=np.int32) % 8)[:, None]

    def body(x: Any, y: Any) -> Any:
        nisa.tensor_scalar(dst=x, data=x, op0=nl.left_shift, operand0=y)
        return x

    np.testing.assert_array_equal(on_tiles(body, data, amount), data << amount)


def test_predicated_copy_of_a_constant_power_and_logical_reductions() -> None:
    data, mask = random((P, 6)), (random((P, 6), 1) > 0).astype(np.uint8)

    def body(x: Any, m: Any) -> Any:
        t, bits, squares, any_set = load(x), load(m), empty((P, 6)), empty((P, 1))
        nisa.tensor_copy_predicated(dst=t, src=0, predicate=bits)
        nisa.tensor_scalar(dst=squares, data=t, op0=nl.power, operand0=2.0)
        nisa.tensor_reduce(dst=any_set, op=nl.logical_or, data=bits, axis=1)
        return store(t), store(squares), store(any_set)

    kept, squares, any_set = execute(body, data, mask).outputs
    np.testing.assert_array_equal(kept, np.where(mask, 0, data))
    np.testing.assert_array_equal(squares, np.square(kept))
    np.testing.assert_array_equal(any_set[:, 0], mask.any(axis=1))


def test_tensor_scalar_reduce_negates_or_leaves_its_result() -> None:
    data = random((P, 6))

    def body(x: Any) -> Any:
        largest, unused = empty((P, 1)), empty((P, 6))
        call = {"data": x, "op0": nl.abs, "operand0": 0.0, "reduce_op": nl.max}
        nisa.tensor_scalar_reduce(dst=unused, **call)
        nisa.tensor_scalar_reduce(dst=unused, reduce_res=largest, reduce_res_negate=True, **call)
        return largest

    np.testing.assert_array_equal(on_tiles(body, data)[:, 0], -np.abs(data).max(axis=1))


@pytest.mark.parametrize("initial", [0.5, "tile"])
def test_scan_is_a_running_recurrence(initial: Any) -> None:
    decay, update, first = random((4, 9)), random((4, 9), 1), random((4, 1), 2)

    def body(a: Any, b: Any, c: Any) -> Any:
        out = empty((4, 9))
        start = c if initial == "tile" else initial
        nisa.tensor_tensor_scan(dst=out, data0=a, data1=b, initial=start, op0=nl.multiply, op1=nl.add)
        return out

    state = first[:, 0] if initial == "tile" else np.full(4, np.float32(initial))
    expected = []
    for i in range(9):
        state = decay[:, i] * state + update[:, i]
        expected.append(state)
    np.testing.assert_array_equal(on_tiles(body, decay, update, first), np.stack(expected, axis=1))


@pytest.mark.parametrize("width", [1, 7, 512])
def test_statistics_give_mean_and_variance(width: int) -> None:
    data = random((P, 3 * width))

    def body(x: Any) -> Any:
        stats, out = empty((P, 3, 6)), empty((P, 2))
        for i in range(3):
            nisa.bn_stats(dst=stats[:, i, :], data=x[:, i * width : (i + 1) * width])
        nisa.bn_aggr(dst=out, data=stats)
        return out

    result = on_tiles(body, data)
    np.testing.assert_allclose(result[:, 0], data.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(result[:, 1], data.var(axis=1), rtol=1e-5)


def test_range_select_keeps_a_range_and_gives_its_largest() -> None:
    data, low, high = random((P, 20)), np.full((P, 1), 14.0, np.float32), np.arange(P, dtype=np.float32)[:, None]

    def body(x: Any, a: Any, b: Any) -> Any:
        tiles, out, largest = [load(t) for t in (x, a, b)], empty((P, 20)), empty((P, 1))
        nisa.range_select(
            dst=out, on_true_tile=tiles[0], comp_op0=nl.greater_equal, comp_op1=nl.less, bound0=tiles[1],
            bound1=tiles[2], range_start=10, reduce_res=largest,
        )  # fmt: skip
        return store(out), store(largest)

    out, largest = execute(body, data, low, high).outputs
    index = np.arange(20) + 10
    expected = np.where((index >= low) & (index < high), data, np.finfo(np.float32).min)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(largest[:, 0], expected.max(axis=1))


def test_local_gather_takes_runs_by_indices_of_sixteen_partitions() -> None:
    data, index = random((32, 10, 3)), np.random.default_rng(0).integers(0, 10, (32, 2)).astype(np.uint16)

    def body(x: Any, i: Any) -> Any:
        out = empty((32, 20, 3))
        nisa.local_gather(dst=out, src_buffer=x, index=i, num_elem_per_idx=3, num_valid_indices=20)
        return out

    result = on_tiles(body, data, index)
    for partition in range(32):
        group = partition // 16 * 16
        chosen = [int(index[group + j % 16, j // 16]) for j in range(20)]
        np.testing.assert_array_equal(result[partition], data[partition, chosen])


def test_cores_exchange_tiles() -> None:
    def body(x: Any) -> Any:
        out = nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        mine, other = nl.program_id(0), 1 - nl.program_id(0)
        given, taken = load(x[mine : mine + 1, :]), empty((1, 8))
        nisa.sendrecv(src=given, dst=taken, send_to_rank=other, recv_from_rank=other, pipe_id=0)
        nisa.dma_copy(dst=out[mine : mine + 1, :], src=taken)
        return out

    data = random((2, 8))
    np.testing.assert_array_equal(execute(body, data, grid=2).output, data[::-1])


def test_registers_from_constants_and_unsigned_words() -> None:
    def body(x: Any) -> Any:
        r, seen = nisa.register_alloc(), empty((1, 1), nl.int32)
        nisa.register_move(r, 3)
        nisa.register_load(r, load(x))
        nisa.register_store(seen, r)
        return store(seen)

    assert execute(body, np.array([[7]], np.uint32)).output.tolist() == [[7]]


def test_signatures_count_the_forms_of_instructions() -> None:
    def body(x: Any) -> Any:
        t, half = load(x), empty((P, 4), nl.bfloat16)
        for _ in range(2):
            nisa.tensor_copy(dst=half, src=t[:, 0:8:2])
        return store(half)

    found = signatures(execute(body, random((P, 8))).instructions or ())
    assert found["tensor_copy on vector: dst sbuf bfloat16 step 1, src sbuf float32 step 2"] == 2
    assert len(found) == 3

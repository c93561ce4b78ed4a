"""Probes of the index kernels and of the pool."""

from __future__ import annotations

from typing import Any

import torch
from nki_emulator import installed

from probe_kernels.forms import P, Probe, loaded, stored

with installed():
    import nki
    import nki.isa as nisa
    import nki.language as nl

MINUS_INFINITY_BITS = 0xFF800000 - (1 << 32)


@nki.jit  # type: ignore[untyped-decorator]
def iota_as_numbers() -> Any:
    """int32 that GpSimd's iota writes, read by VectorE: 3 * partition + 128 * column."""
    whole = nl.ndarray((P, 8), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=whole, pattern=[[P, 8]], channel_multiplier=3)
    places = nl.ndarray((P, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=places, src=whole)
    return stored(places, (P, 8), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def minus_infinity_by_predicate(scores: Any, limits: Any) -> Any:
    """-inf, as bits and with stride 0, over fp32 [128, 8] where fp32 [128, 8] is at least 4: a uint8 predicate."""
    tile = loaded(scores)
    limit = loaded(limits)
    bits = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=bits, value=MINUS_INFINITY_BITS)
    four = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=four, value=4.0)
    hidden = nl.ndarray((P, 8), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=hidden, data1=limit, data2=four.broadcast(1, 8), op=nl.greater_equal)
    nisa.tensor_copy_predicated(dst=tile, src=bits.view(nl.float32).broadcast(1, 8), predicate=hidden)
    return stored(tile, (P, 8), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def transpose_of_fp32(scores: Any) -> Any:
    """fp32 [128, 64] through TensorE's transpose and ScalarE's copy out of PSUM."""
    tile = loaded(scores)
    bank = nl.ndarray((64, P), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=tile)
    block = nl.ndarray((64, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=block, src=bank, engine=nisa.engine.scalar)
    return stored(block, (64, P), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def relu_beside_a_nan(scores: Any, weights: Any) -> Any:
    """max(score, 0) * weight of fp32 [128, 64], one of which is a NaN."""
    tile = loaded(scores)
    factors = loaded(weights)
    products = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=products, data=tile, op0=nl.maximum, operand0=0.0, op1=nl.multiply, operand1=factors)
    return stored(products, (P, 64), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def sums_on_row_tiles(scores: Any, weights: Any) -> Any:
    """relu(fp32 [128, 128]) summed with weights fp32 [128, 1] over each 32 partitions, by TensorE: fp32 [128, 4].

    A row tile for each sum, with the scores stationary and one moving column; ScalarE's relu reads PSUM.
    """
    tile = loaded(scores)
    column = loaded(weights)
    turned = nl.ndarray((P, P), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=tile)
    positive = nl.ndarray((P, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=positive, op=nl.relu, data=turned)
    sums = nl.ndarray((P, 4), dtype=nl.float32, buffer=nl.psum)
    for part in range(4):
        nisa.nc_matmul(
            dst=sums[:, part : part + 1],
            stationary=positive[32 * part : 32 * part + 32, :],
            moving=column[32 * part : 32 * part + 32, :],
            accumulate=False,
            tile_position=(32 * part, 0),
            tile_size=(32, P),
        )
    return stored(sums, (P, 4), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def sigmoid_far_out(x: Any) -> Any:
    """ScalarE's sigmoid of fp32 [128, 8], and of its negative."""
    tile = loaded(x)
    both = nl.ndarray((P, 2, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=both[:, 0, :], op=nl.sigmoid, data=tile)
    nisa.activation(dst=both[:, 1, :], op=nl.sigmoid, data=tile, scale=-1.0)
    return stored(both, (P, 2, 8), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def sigmoid_close_in(x: Any) -> Any:
    """ScalarE's sigmoid of fp32 [128, 64]: its error."""
    return _function(x, nl.sigmoid)


@nki.jit  # type: ignore[untyped-decorator]
def exp_close_in(x: Any) -> Any:
    """ScalarE's exp of fp32 [128, 64] below 0: its error."""
    return _function(x, nl.exp)


def _function(x: Any, function: Any) -> Any:
    tile = loaded(x)
    y = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=y, op=function, data=tile)
    return stored(y, (P, 64), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def integer_by_position(x: Any, columns: int) -> Any:
    """The first `columns` columns of fp32 [128, 64], copied: a compile-time constant given by position."""
    tile = loaded(x[:, 0:columns])
    return stored(tile, (P, columns), nl.float32)


def index_and_pool_probes() -> tuple[Probe, ...]:
    """What docs/index_and_pool.md leaves to a device, but for the rate of gathers."""
    generator = torch.Generator().manual_seed(3)
    places = (3 * torch.arange(P)[:, None] + P * torch.arange(8)[None, :]).float()
    hidden = torch.arange(8).float().repeat(P, 1)
    scores = torch.randn((P, 8), generator=generator)
    scores[0, 6], scores[1, 7] = float("nan"), float("inf")
    covered = torch.where(hidden >= 4, torch.tensor(float("-inf")), scores)
    wide = torch.randn((P, 64), generator=generator)
    wide[3, 5], wide[7, 9] = float("-inf"), 2.0**-120
    nan = wide.clone()
    nan[2, 4] = float("nan")
    weights = torch.randint(1, 4, (P, 64), generator=generator).float()
    products = wide.clamp(min=0) * weights
    there = torch.zeros((P, 64), dtype=torch.bool)
    there[2, 4] = True
    heads = torch.randint(-(2**11), 2**11, (P, P), generator=generator) * 2.0**-8
    head_weights = torch.randint(-(2**7), 2**7, (P, 1), generator=generator) * 2.0**-5
    heads[5, 40] = float("nan")
    summed = (heads.clamp(min=0) * head_weights.T).reshape(P, 4, 32).sum(-1)
    spoilt = torch.zeros((P, 4), dtype=torch.bool)
    spoilt[5, 1] = True
    infinite = float("inf")
    far = torch.tensor([2e4, -2e4, infinite, -infinite, 1e30, -1e30, 0.0, 200.0]).repeat(P, 1)
    near = torch.linspace(-12, 12, P * 64).reshape(P, 64)
    ends = torch.stack([torch.sigmoid(far.double()), torch.sigmoid(-far.double())], dim=1).float()
    torch_instead = "no index kernels: DEEPINFER_NEURON_NKI_ATTN=0"
    pool_instead = "the pool in torch: DEEPINFER_NEURON_NKI_ATTN=0"
    return (
        Probe(iota_as_numbers, (), places, torch_instead),
        Probe(minus_infinity_by_predicate, (scores, hidden), covered, "add -inf after replacing NaN"),
        Probe(transpose_of_fp32, (wide,), wide.T.contiguous(), "store scores in short runs, without a transpose"),
        Probe(relu_beside_a_nan, (nan, weights), products, torch_instead, free=there),
        Probe(sums_on_row_tiles, (heads, head_weights), summed, "sum heads on VectorE alone", free=spoilt),
        Probe(sigmoid_far_out, (far,), ends, pool_instead, tolerance=2.0**-20),
        Probe(sigmoid_close_in, (near,), torch.sigmoid(near.double()).float(), pool_instead, tolerance=2.0**-20),
        Probe(exp_close_in, (-near.abs(),), (-near.abs()).double().exp().float(), pool_instead, tolerance=2.0**-20),
        Probe(integer_by_position, (wide, 40), wide[:, :40].contiguous(), "one kernel for each number of entries"),
    )

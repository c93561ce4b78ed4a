"""Probes of the attention kernels: gathers, scores on top of a bias, and what softmax may meet."""

from __future__ import annotations

from typing import Any

import torch
from nki_emulator import installed

from probe_kernels.forms import P, Probe, RateProbe, loaded, stored

with installed():
    import nki
    import nki.isa as nisa
    import nki.language as nl

ROW = 512
"""Columns of a key."""
GATHERS = 16
GATHER_SECONDS = 1.2e-6
"""Twice what the cost model takes a gather of 128 rows to hold its queue for."""


@nki.jit  # type: ignore[untyped-decorator]
def gather_by_a_column(rows: Any, indices: Any) -> Any:
    """Rows of bf16 [n, 512] by int32 [128, 3, 2] in SBUF, of which the indices are one column."""
    index = loaded(indices)
    keys = nl.ndarray((P, ROW), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=keys, src=rows.vector_select(0, index[:, 1, 1:2]), dge_mode=nisa.dge_mode.swdge)
    return stored(keys, (P, ROW), nl.bfloat16)


@nki.jit  # type: ignore[untyped-decorator]
def many_gathers(rows: Any, indices: Any) -> Any:
    """16 gathers of 128 rows of bf16 [n, width], the last of which is returned."""
    return _gathers(rows, indices, GATHERS)


@nki.jit  # type: ignore[untyped-decorator]
def one_gather(rows: Any, indices: Any) -> Any:
    """One of them."""
    return _gathers(rows, indices, 1)


def _gathers(rows: Any, indices: Any, count: int) -> Any:
    index = loaded(indices)
    width = rows.shape[1]
    keys = nl.ndarray((P, count, width), dtype=nl.bfloat16, buffer=nl.sbuf)
    for number in range(count):
        column = (GATHERS - count + number) % GATHERS
        source = rows.vector_select(0, index[:, column : column + 1])
        nisa.dma_copy(dst=keys[:, number, :], src=source, dge_mode=nisa.dge_mode.swdge)
    return stored(keys[:, count - 1, :], (P, width), nl.bfloat16)


@nki.jit  # type: ignore[untyped-decorator]
def gathers_with_work(rows: Any, indices: Any) -> Any:
    """16 gathers, each followed by a pass of VectorE over what came."""
    index = loaded(indices)
    width = rows.shape[1]
    keys = nl.ndarray((P, GATHERS, width), dtype=nl.bfloat16, buffer=nl.sbuf)
    for number in range(GATHERS):
        source = rows.vector_select(0, index[:, number : number + 1])
        nisa.dma_copy(dst=keys[:, number, :], src=source, dge_mode=nisa.dge_mode.swdge)
        words = keys[:, number, :].view(nl.int32)
        nisa.tensor_scalar(dst=words, data=words, op0=nl.bitwise_and, operand0=-1)
    return stored(keys[:, GATHERS - 1, :], (P, width), nl.bfloat16)


@nki.jit  # type: ignore[untyped-decorator]
def scores_onto_a_bias(bias: Any, queries: Any, keys: Any) -> Any:
    """A matmul over 64 columns, and two by tiles of 32 columns that add to its halves."""
    biases = loaded(bias)
    stationary = loaded(queries)
    moving = loaded(keys)
    scores = nl.ndarray((64, P), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=scores, stationary=biases, moving=moving, accumulate=False)
    for query in range(2):
        mine = nl.ds(32 * query, 32)
        nisa.nc_matmul(
            dst=scores[mine, :],
            stationary=stationary[:, mine],
            moving=moving,
            accumulate=True,
            tile_position=(0, 32 * query),
            tile_size=(P, 32),
        )
    return stored(scores, (64, P), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def row_numbers_to_int32(numbers: Any) -> Any:
    """fp32 [8, 128], turned by TensorE and written to int32 by VectorE, with what is below 0 as 0."""
    lists = loaded(numbers)
    turned = nl.ndarray((P, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=lists)
    rows = nl.ndarray((P, 8), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=rows, data=turned, op0=nl.maximum, operand0=0.0)
    return stored(rows, (P, 8), nl.int32)


@nki.jit  # type: ignore[untyped-decorator]
def int32_to_row_numbers(entries: Any) -> Any:
    """int32 [8, 128] read as numbers by VectorE."""
    lists = loaded(entries)
    numbers = nl.ndarray((8, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=numbers, src=lists)
    return stored(numbers, (8, P), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def mask_of_each_partition(keys: Any, masks: Any) -> Any:
    """bf16 [128, 512] seen as int32, bits kept where int32 [128, 1] has them: NaN included."""
    tile = loaded(keys)
    mask = loaded(masks)
    words = tile.view(nl.int32)
    nisa.tensor_scalar(dst=words, data=words, op0=nl.bitwise_and, operand0=mask)
    return stored(tile, (P, ROW), nl.bfloat16)


@nki.jit  # type: ignore[untyped-decorator]
def exp_of_scores(scores: Any, maxima: Any) -> Any:
    """exp(score - maximum) in bf16, of fp32 [128, 8] less fp32 [128, 1]."""
    tile = loaded(scores)
    bias = loaded(maxima)
    shares = nl.ndarray((P, 8), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=shares, op=nl.exp, data=tile, bias=bias)
    return stored(shares, (P, 8), nl.bfloat16)


@nki.jit  # type: ignore[untyped-decorator]
def exp_and_sum_from_psum(scores: Any, maxima: Any) -> Any:
    """The fp32 sums of exp(score - maximum), in bf16, of fp32 [64, 128] in PSUM less fp32 [64, 1]."""
    tile = loaded(scores)
    bias = loaded(maxima)
    bank = nl.ndarray((64, P), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=tile)
    shares = nl.ndarray((64, P), dtype=nl.bfloat16, buffer=nl.sbuf)
    total = nl.ndarray((64, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(dst=shares, op=nl.exp, data=bank, reduce_op=nl.add, reduce_res=total, bias=bias)
    return stored(total, (64, 1), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def maximum_beside_a_nan(scores: Any) -> Any:
    """The negated largest of fp32 [128, 64], of which one row holds a NaN."""
    tile = loaded(scores)
    largest = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=1, negate=True)
    return stored(largest, (P, 1), nl.float32)


def attention_probes() -> tuple[Probe, ...]:
    """What docs/attention.md leaves to a device, but for rates."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn((200, ROW), generator=generator).bfloat16()
    indices = torch.randint(200, (P, 3, 2), generator=generator, dtype=torch.int32)
    small = [torch.randint(-3, 4, (P, width), generator=generator).bfloat16() for width in (64, 64, P)]
    products = [matrix.float().T @ small[2].float() for matrix in small[:2]]
    numbers = torch.randint(-1, 2**24, (8, P), generator=generator).float()
    numbers[0, :4] = torch.tensor([-1.0, 2.0**24 - 1, 2.0**24, 0.0])
    whole = numbers.to(torch.int32)
    masks = torch.where(torch.arange(P)[:, None] % 3 == 0, 0, -1).to(torch.int32)
    keys = rows[:P].clone()
    keys[0], keys[1] = float("nan"), float("-inf")
    kept = torch.where(masks == 0, torch.zeros((), dtype=torch.bfloat16), keys)
    scores = torch.tensor([0.0, -1e37, -3e38, -(2.0**126), -200.0, -104.0, 0.0, -1e30]).repeat(P, 1)
    shares = torch.tensor([1.0, 0, 0, 0, 0, 0, 1.0, 0]).repeat(P, 1).bfloat16()
    zeros_and_far = torch.where(torch.rand((P, 64), generator=generator) < 0.5, 0.0, -200.0)
    counts = (zeros_and_far == 0).sum(dim=0).float()[:, None]
    many = torch.randn((P, 64), generator=generator)
    largest = -many.amax(dim=1, keepdim=True)
    many[5, 7] = float("nan")
    not_five = torch.zeros((P, 1), dtype=torch.bool)
    not_five[5] = True
    lists = "no attention kernels: DEEPINFER_NEURON_NKI_ATTN=0"
    return (
        Probe(
            gather_by_a_column, (rows, indices), rows[indices[:, 1, 1].long()], "copy the column to a tile of its own"
        ),
        Probe(scores_onto_a_bias, tuple(small), products[0] + products[1], "add the bias on VectorE"),
        Probe(row_numbers_to_int32, (numbers,), whole.clamp(min=0).T.contiguous(), lists),
        Probe(int32_to_row_numbers, (whole,), numbers, lists),
        Probe(mask_of_each_partition, (keys, masks), kept, "select_reduce with zeros"),
        Probe(exp_of_scores, (scores, torch.zeros((P, 1))), shares, "cut scores to [-88, 0] first", tolerance=2.0**-9),
        Probe(exp_and_sum_from_psum, (zeros_and_far, torch.zeros((64, 1))), counts, lists, tolerance=2.0**-9),
        Probe(maximum_beside_a_nan, (many,), largest, "replace NaN in the cache as it is written", free=not_five),
    )


def attention_rates() -> tuple[RateProbe, ...]:
    """What a gather costs, of rows of 1 KiB (keys) and 2 KiB (candidates), and whether work hides behind it."""
    generator = torch.Generator().manual_seed(2)
    probes = []
    for width in (ROW, 2 * ROW):
        rows = torch.randn((4096, width), generator=generator).bfloat16()
        indices = torch.randint(4096, (P, GATHERS), generator=generator, dtype=torch.int32)
        last = rows[indices[:, -1].long()]
        kernels = (many_gathers, one_gather, gathers_with_work)
        many, one, work = (Probe(kernel, (rows, indices), last, "see the rate") for kernel in kernels)
        slow = "the times of attention and candidates in the docs are too short: choose by a device's"
        size = f"128 rows of {2 * width} bytes"
        probes.append(RateProbe(f"a gather of {size}", many, one, GATHERS - 1, GATHER_SECONDS, slow))
        probes.append(
            RateProbe(
                f"a pass of VectorE beside a gather of {size}",
                work,
                many,
                GATHERS,
                width / 2 / 0.96e9 / 2,
                "gather a group ahead of its use",
            )
        )
    return tuple(probes)

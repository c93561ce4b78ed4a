"""Lists, stores, pools and attention of a step compile over the stand-in and give what eager gives."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_prep.runtime import attention
from tests.runtime.backend.harness import assert_same
from tests.runtime.backend.stand_in import Compiled

RING, PAGE, D, HEADS = 16, 4, 64, 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode_step(
    q: Tensor, kv: Tensor, score: Tensor, latent: Tensor, window: Tensor, compressed: Tensor, state: Tensor,
    states: Tensor, positions: Tensor, tables: Tensor, sink: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    attention.store_rows(window, attention.window_rows(states, positions, RING), kv)
    pooled = attention.compress_and_update_state_decode(score, latent, state, states, positions + 1, 2, 2)
    stored = attention.entry_rows(attention.stored_entries(positions, 2), tables, states, PAGE)
    attention.store_rows(compressed, stored, pooled)
    klen = attention.visible_entries(positions, 2)
    entries = torch.where(torch.arange(6) < klen.unsqueeze(-1), torch.arange(6), -1).int()
    lists = attention.window_lists(states, positions, RING, width=8)
    rows = attention.entry_rows(entries, tables, states, PAGE)
    return attention.sparse_attn_two_caches(q, window, lists, compressed, rows, sink, 0.1), lists, rows


def prefill_step(
    q: Tensor, kv: Tensor, score: Tensor, latent: Tensor, window: Tensor, state: Tensor, sequences: Tensor,
    positions: Tensor, starts: Tensor, bounds: Tensor, context: Tensor, sink: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    history = attention.history_rows(torch.arange(2), starts, RING, width=8)
    rows = torch.cat([window[history.clamp(min=0).flatten().long()], kv])
    lists = attention.prefill_window_lists(sequences, positions, starts, bounds[:-1], width=8)
    mapping, compressed = ints(0, 0, 0, 1, 1), ints(0, 3, 5)
    pooled = attention.compress_and_update_state_prefill(
        score, latent, state, ints(0, 1), mapping, bounds, context, compressed, 2
    )
    attention.store_rows(window, attention.window_rows(sequences, positions, RING), kv)
    return attention.sparse_attn(q, rows, sink, lists, 0.1), pooled, lists


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def decode_arguments() -> tuple[Tensor, ...]:
    return (
        random(4, HEADS, D).bfloat16(), random(4, D).bfloat16(), random(4, D), random(4, D) + 1,
        random(2 * RING + 1, D).bfloat16(), random(6 * PAGE + 1, D).bfloat16(), random(2, RING, 2, D),
        ints(0, 0, 1, 1), ints(6, 7, 0, 1), ints(3, 0, 5, 1, 2, 4).view(2, 3), random(HEADS),
    )  # fmt: skip


def prefill_arguments() -> tuple[Tensor, ...]:
    return (
        random(8, HEADS, D).bfloat16(), random(8, D).bfloat16(), random(8, D), random(8, D) + 1,
        random(2 * RING + 1, D).bfloat16(), random(2, RING, 2, D), ints(0, 0, 0, 0, 0, 1, 1, 1),
        ints(3, 4, 5, 6, 7, 10, 11, 12), ints(3, 10), ints(0, 5, 8), ints(0, 8, 21), random(HEADS),
    )  # fmt: skip


def test_a_decode_step_compiles_and_writes_its_caches_in_place(compiled: list[Compiled]) -> None:
    eager, given = decode_arguments(), decode_arguments()
    run = torch.compile(decode_step, backend="deepinfer_neuron", fullgraph=True, dynamic=False)
    assert_same(decode_step(*eager), run(*given))
    assert_same(eager, given)
    assert len(compiled) == 1
    assert len(compiled[0].mutated) == 3


def test_a_prefill_step_compiles(compiled: list[Compiled]) -> None:
    eager, given = prefill_arguments(), prefill_arguments()
    run = torch.compile(prefill_step, backend="deepinfer_neuron", fullgraph=True, dynamic=False)
    assert_same(prefill_step(*eager), run(*given))
    assert_same(eager, given)
    assert len(compiled) == 1

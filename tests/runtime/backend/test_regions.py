"""Regions: one graph for all layers of a kind, padded steps, caches that are written in place."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from deepinfer_prep.errors import PrepError
from deepinfer_prep.runtime import attention
from deepinfer_prep.runtime.regions import Region
from tests.runtime.backend.stand_in import Compiled

D, HEADS, RING = 32, 2, 16
LAYERS = 3


def part(rows: tuple[Tensor, ...], weights: dict[str, Tensor], cache: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Keys into the ring, then attention: one weight in fp8, as checkpoints have them."""
    x, states, positions = rows
    keys = x @ weights["keys"].to(torch.bfloat16).T
    attention.store_rows(cache, attention.window_rows(states, positions, RING), keys)
    queries = (x @ weights["queries"].T).view(-1, HEADS, D)
    lists = attention.window_lists(states, positions, RING, width=window)
    return attention.sparse_attn(queries, cache, weights["sink"], lists, D**-0.5), positions


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights(layer: int) -> dict[str, Tensor]:
    return {
        "keys": random(layer, D, D).to(torch.float8_e4m3fn),
        "queries": random(layer + 10, HEADS * D, D),
        "sink": random(layer + 20, HEADS).float(),
    }


def step(count: int, first: int) -> tuple[Tensor, ...]:
    """`count` tokens of one sequence."""
    return random(first, count, D), torch.zeros(count, dtype=torch.int32), torch.arange(first, first + count).int()


def test_layers_of_a_kind_share_a_graph_for_each_bucket(compiled: list[Compiled]) -> None:
    kinds = {window: Region(partial(part, window=window)) for window in (4, 8)}
    caches = {(kind, layer): torch.zeros(RING + 1, D).bfloat16() for kind in kinds for layer in range(LAYERS)}
    plain = {key: cache.clone() for key, cache in caches.items()}
    first = 0
    for count in (1, 3, 4, 1, 2, 7):
        rows = step(count, first)
        for kind, region in kinds.items():
            for layer in range(LAYERS):
                found, positions = region(rows, weights(layer), caches[kind, layer])
                expected, _ = part(rows, weights(layer), plain[kind, layer], kind)
                assert torch.equal(found, expected)
                assert torch.equal(positions, rows[2])
                assert torch.equal(caches[kind, layer], plain[kind, layer])
        first += count
    assert [region.graphs for region in kinds.values()] == [3, 3]
    assert len(compiled) == 6
    assert all(len(one.mutated) == 1 for one in compiled)


def test_more_graphs_than_torch_allows_a_function(compiled: list[Compiled]) -> None:
    limit: int = torch._dynamo.config.recompile_limit
    region = Region(partial(part, window=4), buckets=(1,))
    for rows in range(RING + 1, RING + 3 + limit):
        region(step(1, 0), weights(0), torch.zeros(rows, D).bfloat16())
    assert region.graphs == len(compiled) == limit + 2


@pytest.mark.parametrize("count", [0, 129])
def test_steps_that_fit_no_bucket_are_refused(count: int) -> None:
    with pytest.raises(PrepError, match=f"{count} tokens and takes 1 to 128"):
        Region(part)(step(count, 0))

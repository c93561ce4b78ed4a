"""A layer's attention over 300 tokens through rings, pages, states and lists, against the formula over the whole.

Sizes are such that everything happens: the window of 128 leaves tokens behind, the ring of 256 rows wraps, pages lie in
any order, groups are split between steps, and the lists of 48 entries are shorter than what a query may see. Caches
are full of NaN at the start: what was never stored is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer_prep.runtime import attention, index

HIDDEN, HEADS, D, ROPE = 64, 8, 512, 64
INDEX_HEADS, INDEX_D, TOP_K = 32, 128, 48
TOKENS, WINDOW, RING, PAGE, DRAFTS, REJECTED = 300, 128, 256, 16, 5, 2
SEQUENCE, SEQUENCES = 1, 3
"""The place of the sequence in each cache, and how many places there are."""
SCALE = D**-0.5
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Weights:
    """Of one layer, fp32 [out, HIDDEN], and [out, D] for the index's keys."""

    query: Tensor
    key: Tensor
    score: Tensor
    latent: Tensor
    index_query: Tensor
    index_weight: Tensor
    index_key: Tensor
    sink: Tensor

    def double(self) -> Weights:
        return Weights(*(tensor.double() for tensor in vars(self).values()))


def new_weights() -> Weights:
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int = HIDDEN) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    return Weights(
        *(matrix(rows) for rows in (HEADS * D, D, D, D, INDEX_HEADS * INDEX_D, INDEX_HEADS)),
        matrix(INDEX_D, D),
        torch.randn(HEADS, generator=generator),
    )


WEIGHTS = new_weights()
X = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """The last 64 columns of x [t, ..., d] turned by position."""
    angles = positions.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1)) * 0.7 ** torch.arange(ROPE // 2).to(x.dtype)
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    pairs = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], dim=-1)
    return torch.cat([x[..., :-ROPE], pairs.flatten(-2)], dim=-1)


def heads_of(projected: Tensor, heads: int) -> Tensor:
    return projected.view(projected.shape[0], heads, -1)


def formula(x: Tensor, weights: Weights, ratio: int) -> Tensor:
    """What the layer gives for x float64 [TOKENS, HIDDEN]: [TOKENS, HEADS, D], with masks for lists."""
    positions = torch.arange(TOKENS)
    q = rotated(heads_of(x @ weights.query.T, HEADS), positions)
    keys = rotated(x @ weights.key.T, positions)
    ago = positions.unsqueeze(-1) - positions
    seen = (ago >= 0) & (ago < WINDOW)
    if ratio:
        entries = TOKENS // ratio
        groups = x[: entries * ratio].view(entries, ratio, HIDDEN)
        pooled = ((groups @ weights.score.T).softmax(1) * (groups @ weights.latent.T)).sum(1)
        klen = (positions + 1) // ratio
        places = torch.arange(entries)
        index_keys = rotated(pooled @ weights.index_key.T, places * ratio)
        products = torch.einsum(
            "thd,cd->thc", rotated(heads_of(x @ weights.index_query.T, INDEX_HEADS), positions), index_keys
        )
        scores = torch.einsum("thc,th->tc", products.relu(), x @ weights.index_weight.T)
        scores = scores.masked_fill(places >= klen.unsqueeze(-1), -torch.inf)
        best = scores.argsort(dim=-1, descending=True)[:, :TOP_K]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True) & scores.isfinite()
        keys, seen = torch.cat([keys, rotated(pooled, places * ratio)]), torch.cat([seen, chosen], dim=1)
    logits = torch.einsum("thd,nd->thn", q, keys) * SCALE
    logits = logits.masked_fill(~seen.unsqueeze(1), -torch.inf)
    sinks = weights.sink.reshape(1, HEADS, 1).expand(TOKENS, HEADS, 1)
    return torch.einsum("thn,nd->thd", torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1], keys)


class Layer:
    """The same, step by step, with what the runtime offers."""

    def __init__(self, ratio: int) -> None:
        self.ratio = ratio
        pages = -(-TOKENS // PAGE)
        self.window = torch.full((SEQUENCES * RING + 1, D), torch.nan)
        self.state = torch.full((SEQUENCES, 8, 2, D), torch.nan)
        self.compressed = torch.full((SEQUENCES * pages * PAGE + 1, D), torch.nan)
        self.tables = torch.randperm(SEQUENCES * pages, generator=torch.Generator().manual_seed(1)).int()
        self.tables = self.tables.view(SEQUENCES, pages)
        self.index_keys = torch.full((1, INDEX_D, pages * PAGE + 1), torch.nan)

    def step(self, x: Tensor, first: int) -> Tensor:
        """x [t, HIDDEN] of the tokens from position `first` on -> [t, HEADS, D]."""
        positions = torch.arange(first, first + x.shape[0], dtype=torch.int32)
        places = torch.full_like(positions, SEQUENCE)
        q = rotated(heads_of(x @ WEIGHTS.query.T, HEADS), positions)
        rows, lists = self._window(rotated(x @ WEIGHTS.key.T, positions), positions, places)
        if self.ratio == 0:
            return attention.sparse_attn(q, rows, WEIGHTS.sink, lists, SCALE)
        self._store_entries(x, positions, places)
        chosen = attention.entry_rows(self._chosen(x, positions), self.tables, places, PAGE)
        return attention.sparse_attn_two_caches(q, rows, lists, self.compressed, chosen, WEIGHTS.sink, SCALE)

    def _window(self, keys: Tensor, positions: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        stored = attention.window_rows(places, positions, RING)
        if len(positions) <= DRAFTS:
            attention.store_rows(self.window, stored, keys)
            return self.window, attention.window_lists(places, positions, RING)
        history = attention.history_rows(places[:1], positions[:1], RING)
        rows = torch.cat([self.window[history[0].long()], keys])
        zeros = torch.zeros_like(positions)
        attention.store_rows(self.window, torch.where(positions > positions[-1] - RING, stored, -1), keys)
        return rows, attention.prefill_window_lists(zeros, positions, positions[:1], zeros[:1])

    def _store_entries(self, x: Tensor, positions: Tensor, places: Tensor) -> None:
        score, latent = x @ WEIGHTS.score.T, x @ WEIGHTS.latent.T
        if len(positions) <= DRAFTS:
            pooled = attention.compress_and_update_state_decode(
                score, latent, self.state, places, positions + 1, DRAFTS, self.ratio, torch.float32
            )
            entries = attention.stored_entries(positions, self.ratio)
        else:
            first, end = int(positions[0]) // self.ratio, int(positions[-1] + 1) // self.ratio
            entries = torch.arange(first, end, dtype=torch.int32)
            ends = [torch.tensor([0, n]) for n in (len(positions), int(positions[-1]) + 1, len(entries))]
            pooled = attention.compress_and_update_state_prefill(
                score, latent, self.state, places[:1], torch.zeros_like(entries), *ends, self.ratio, None, torch.float32
            )
        tokens = entries.clamp(min=0) * self.ratio
        lines = torch.full_like(entries, SEQUENCE)
        kept = attention.entry_rows(entries, self.tables, lines, PAGE)
        attention.store_rows(self.compressed, kept, rotated(pooled, tokens))
        index_keys = rotated(pooled @ WEIGHTS.index_key.T, tokens)
        index.store_keys(self.index_keys, index_keys, torch.zeros_like(entries), entries)

    def _chosen(self, x: Tensor, positions: Tensor) -> Tensor:
        queries = rotated(heads_of(x @ WEIGHTS.index_query.T, INDEX_HEADS), positions)
        klen = attention.visible_entries(positions, self.ratio)
        scores = index.index_score(queries, self.index_keys, x @ WEIGHTS.index_weight.T, klen)
        return index.top_k_positions(scores, klen, TOP_K)


def in_steps(layer: Layer, sizes: Iterator[int]) -> Tensor:
    found, first = [], 0
    while first < TOKENS:
        end = min(TOKENS, first + next(sizes))
        found.append(layer.step(X[first:end], first))
        first = end
    return torch.cat(found)


def whole(layer: Layer) -> Tensor:
    return layer.step(X, 0)


def in_chunks(layer: Layer) -> Tensor:
    return in_steps(layer, (13 if step % 2 else 7 for step in range(TOKENS)))


def token_by_token(layer: Layer) -> Tensor:
    return in_steps(layer, (1 for _ in range(TOKENS)))


def as_drafts(layer: Layer) -> Tensor:
    """Five tokens a step, of which the last two are wrong and come again as others."""
    generator = torch.Generator().manual_seed(5)
    found, first, kept = [], 0, DRAFTS - REJECTED
    while first < TOKENS:
        right = X[first : first + kept]
        wrong = torch.randn(DRAFTS - len(right), HIDDEN, generator=generator)
        found.append(layer.step(torch.cat([right, wrong]), first)[: len(right)])
        first += len(right)
    return torch.cat(found)


@pytest.fixture(scope="module", params=[0, 1, 2])
def expected(request: pytest.FixtureRequest) -> tuple[int, Tensor]:
    return request.param, formula(X.double(), WEIGHTS.double(), request.param)


@pytest.mark.parametrize("run", [whole, in_chunks, token_by_token, as_drafts])
def test_every_way_of_running_gives_the_formula(expected: tuple[int, Tensor], run: Callable[[Layer], Tensor]) -> None:
    ratio, formula_gives = expected
    found = run(Layer(ratio))
    assert found.shape == (TOKENS, HEADS, D)
    assert (found - formula_gives).abs().max() <= TOLERANCE


def test_the_last_token_depends_on_its_window_and_in_layers_with_entries_on_what_lies_before(
    expected: tuple[int, Tensor],
) -> None:
    """Had a token no share in what the last one gives, the ways of running could lose it unseen."""
    ratio, formula_gives = expected
    first = TOKENS - WINDOW
    for tokens, matters in ((slice(first, first + 1), True), (slice(0, first), ratio > 0)):
        x = X.double()
        x[tokens] += 3.0
        moved = (formula(x, WEIGHTS.double(), ratio) - formula_gives)[-1].abs().max()
        assert (moved > 10 * TOLERANCE) == matters

"""The references of attention, index scores, pool, norm and SwiGLU against plain statements in float64."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_prep.kernels import attention_reference as reference
from deepinfer_prep.kernels import norm_reference

GENERATOR = torch.Generator().manual_seed(0)
SCALE = 512**-0.5


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def stated_attention(
    q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, idx: torch.Tensor, scale: float
) -> torch.Tensor:
    """Key by key in float64, for finite sinks."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t, row in enumerate(idx.tolist()):
        keys = [kv[i].double() for i in row if i >= 0]
        for h in range(q.shape[1]):
            scores = [scale * float(q[t, h].double() @ key) for key in keys]
            top = max([*scores, float(sink[h])])
            total = sum(math.exp(score - top) for score in scores) + math.exp(float(sink[h]) - top)
            for score, key in zip(scores, keys, strict=True):
                out[t, h] += math.exp(score - top) / total * key
    return out


def lists(queries: int, k: int, rows: int, valid: int) -> torch.Tensor:
    """Distinct keys at random places, -1 elsewhere."""
    idx = torch.full((queries, k), -1, dtype=torch.int32)
    for row in idx:
        places = torch.randperm(k, generator=GENERATOR)[:valid]
        row[places] = torch.randperm(rows, generator=GENERATOR)[:valid].int()
    return idx


@pytest.mark.parametrize(("k", "valid"), [(1, 1), (5, 0), (5, 3), (64, 64), (133, 127)])
def test_attention_is_what_its_sum_says(k: int, valid: int) -> None:
    q, kv, sink = random(3, 8, 64).bfloat16(), random(150, 64).bfloat16(), random(8)
    idx = lists(3, k, 150, valid)
    expected = stated_attention(q, kv, sink, idx, SCALE)
    torch.testing.assert_close(
        reference.attention_values(q, kv, sink, idx, SCALE, torch.float64), expected, rtol=1e-12, atol=1e-12
    )
    found = reference.sparse_attn(q, kv, sink, idx, SCALE)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("empty", [-1, -7, 150, 2**31 - 1])
def test_what_an_empty_entry_points_at_has_no_influence(empty: int) -> None:
    q, kv, sink = random(2, 8, 64).bfloat16(), random(150, 64).bfloat16(), random(8)
    idx = torch.tensor([[-1, 3, -1, 9], [4, -1, -1, -1]], dtype=torch.int32)
    spoilt = kv.clone()
    spoilt[[0, 1, 2, 149]] = torch.nan
    found = reference.sparse_attn(q, spoilt, sink, torch.where(idx < 0, empty, idx), SCALE)
    assert torch.equal(found, reference.sparse_attn(q, kv, sink, idx, SCALE))


def test_an_infinite_sink_takes_all_and_minus_infinity_nothing() -> None:
    q, kv, idx = random(2, 8, 64).bfloat16(), random(9, 64).bfloat16(), lists(2, 6, 9, 4)
    all_of_it = reference.sparse_attn(q, kv, torch.full((8,), torch.inf), idx, SCALE)
    assert torch.equal(all_of_it, torch.zeros_like(q))
    none, hardly = (reference.sparse_attn(q, kv, torch.full((8,), s), idx, SCALE) for s in (-torch.inf, -1e4))
    assert torch.equal(none, hardly)
    assert (none != 0).all()


@pytest.mark.parametrize("sink", [-torch.inf, -1e4, 0.0, 50.0, torch.inf])
def test_a_query_without_keys_yields_zero(sink: float) -> None:
    q, kv = random(1, 8, 64).bfloat16(), torch.full((4, 64), torch.nan).bfloat16()
    found = reference.sparse_attn(q, kv, torch.full((8,), sink), torch.full((1, 5), -1, dtype=torch.int32), SCALE)
    assert torch.equal(found, torch.zeros_like(q))


def test_scores_of_ten_thousand_do_not_overflow() -> None:
    q, kv, idx = random(2, 8, 64).bfloat16() * 1e4, random(40, 64).bfloat16(), lists(2, 40, 40, 40)
    found = reference.sparse_attn(q, kv, torch.zeros(8), idx, SCALE)
    assert found.isfinite().all()
    torch.testing.assert_close(
        found.double(), stated_attention(q, kv, torch.zeros(8), idx, SCALE), rtol=0.01, atol=0.01
    )


def test_nan_in_a_query_stays_in_its_row_and_head() -> None:
    q, kv, idx = random(2, 8, 64).bfloat16(), random(9, 64).bfloat16(), lists(2, 6, 9, 4)
    q[1, 2, 5] = torch.nan
    found = reference.sparse_attn(q, kv, torch.zeros(8), idx, SCALE).isnan().any(-1)
    assert found[1, 2]
    assert int(found.sum()) == 1


def test_index_scores_weigh_what_is_positive() -> None:
    q, keys, weights = random(3, 4, 128).bfloat16(), random(128, 20).bfloat16(), random(3, 4)
    klen = torch.tensor([0, 7, 20], dtype=torch.int32)
    found = reference.index_score(q, keys, weights, klen)
    for t in range(3):
        for j in range(20):
            dots = [max(0.0, float(q[t, h].double() @ keys[:, j].double())) for h in range(4)]
            expected = sum(dot * float(weights[t, h]) for h, dot in enumerate(dots))
            assert found[t, j] == -torch.inf if j >= klen[t] else abs(float(found[t, j]) - expected) < 1e-3


def test_what_lies_behind_the_last_entry_never_shows() -> None:
    q, keys, weights = random(2, 4, 128).bfloat16(), random(128, 20).bfloat16(), random(2, 4)
    keys[:, 9:] = torch.nan
    klen = torch.tensor([9, 3], dtype=torch.int32)
    found = reference.index_score(q, keys, weights, klen)
    assert found[0, :9].isfinite().all()
    assert torch.equal(found == -torch.inf, torch.arange(20) >= klen[:, None])


@pytest.mark.parametrize("n", [1, 7, 8, 511, 512, 513, 1000])
def test_top_k_is_exact_by_value(n: int) -> None:
    scores = random(4, n).round(decimals=1)
    klen = torch.tensor([0, 1, n // 2, n], dtype=torch.int32)
    scores[torch.arange(n) >= klen[:, None]] = torch.nan
    chosen = reference.top_k(scores, klen, 512)
    assert chosen.shape == (4, 512)
    assert chosen.dtype == torch.int32
    for row, length, found in zip(scores, klen.tolist(), chosen, strict=True):
        kept = found[found >= 0]
        assert len(kept) == min(512, length)
        assert (found[len(kept) :] == -1).all()
        assert (kept.diff() > 0).all()
        assert torch.equal(row[kept].sort(descending=True).values, row[:length].sort(descending=True).values[:512])


def test_the_last_block_is_a_candidate_whatever_it_scores() -> None:
    scores = torch.arange(30, 0, -1.0).repeat(3, 1)
    klen = torch.tensor([30, 17, 0], dtype=torch.int32)
    blocks = reference.candidate_blocks(scores, klen, 3)
    assert blocks.tolist() == [[0, 1, 3], [0, 1, 2], [-1, -1, -1]]
    kept = reference.within_candidates(reference.masked(scores, klen), blocks) > -torch.inf
    assert kept[0].nonzero().flatten().tolist() == [*range(16), *range(24, 30)]
    assert kept[1].nonzero().flatten().tolist() == list(range(17))
    assert not kept[2].any()


def test_lists_of_candidates_may_be_longer_than_there_are_blocks() -> None:
    blocks = reference.candidate_blocks(random(1, 20), torch.tensor([20], dtype=torch.int32), 2048)
    assert blocks.shape == (1, 2048)
    assert blocks[0, :4].tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_a_pool_is_a_softmax_of_each_channel(ratio: int) -> None:
    score, latent = random(5, ratio, 16) * 3, random(5, ratio, 16)
    found = reference.pool_values(score, latent, torch.float64)
    for g in range(5):
        for c in range(16):
            shares = [math.exp(float(one)) for one in score[g, :, c]]
            expected = sum(s * float(v) for s, v in zip(shares, latent[g, :, c], strict=True)) / sum(shares)
            assert abs(float(found[g, c]) - expected) < 1e-12
    assert torch.equal(
        reference.compress_pool(score, latent), reference.pool_values(score, latent, torch.float32).bfloat16()
    )


def test_scores_far_apart_choose_one_token() -> None:
    score = torch.tensor([[[1e4, -1e4, -torch.inf], [-1e4, 1e4, 2.0]]])
    latent = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    assert reference.compress_pool(score, latent).tolist() == [[1.0, 5.0, 6.0]]


def test_norm_rounds_once() -> None:
    x, weight = random(4, 3, 640).bfloat16(), random(640).bfloat16()
    x[0] = 0.0
    x[1, 0] *= 1e10
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()
    found = norm_reference.rmsnorm(x, weight)
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs()).all()
    torch.testing.assert_close(norm_reference.rmsnorm_values(x, weight, torch.float64), exact, rtol=1e-12, atol=0)


def test_swiglu_limits_gate_above_and_up_on_both_sides() -> None:
    gate = torch.tensor([-100.0, -2.0, 0.0, 5.0, 10.0, 40.0]).bfloat16()
    up = torch.tensor([1.0, -40.0, 3.0, 40.0, 2.0, 1.0]).bfloat16()
    exact = [g / (1 + math.exp(-g)) * u for g, u in [(-100, 1), (-2, -10), (0, 3), (5, 10), (10, 2), (10, 1)]]
    found = norm_reference.swiglu(gate, up)
    torch.testing.assert_close(found.double(), torch.tensor(exact, dtype=torch.float64), rtol=2**-8, atol=2**-20)
    weighted = norm_reference.swiglu_weighted(gate[None], up[None], torch.tensor([1.5]))[0]
    torch.testing.assert_close(
        weighted.double(), 1.5 * torch.tensor(exact, dtype=torch.float64), rtol=2**-8, atol=2**-20
    )

"""Index scores and lists: torch on a host, a kernel on a device unless it is switched off or does not fit."""

from __future__ import annotations

import pytest
import torch

from deepinfer_prep.kernels import attention_reference as reference
from deepinfer_prep.runtime import index
from tests.runtime.fake_neuron import FakeNeuron

N = 300


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


Q = random(2, 3, 32, 128).bfloat16()
KEYS = random(2, 128, N).bfloat16()
WEIGHTS = random(2, 3, 32)
KLEN = torch.tensor([[0, 1, N], [7, 200, 299]])


def expected(entries: int = N) -> torch.Tensor:
    rows = [reference.index_score(Q[s], KEYS[s, :, :entries], WEIGHTS[s], KLEN[s].int()) for s in range(2)]
    return torch.stack(rows)


def test_on_a_host_the_reference_computes() -> None:
    assert not index.index_score_supported(Q, KEYS)
    torch.testing.assert_close(index.index_score(Q, KEYS, WEIGHTS, KLEN), expected())
    torch.testing.assert_close(index.index_score(Q, KEYS, WEIGHTS, KLEN, 128), expected(128))
    one = index.index_score(Q[1], KEYS[1], WEIGHTS[1], KLEN[1])
    torch.testing.assert_close(one, expected()[1])


def test_on_a_device_the_kernel_computes_and_the_whole_cache_is_handed_over(fake_neuron: FakeNeuron) -> None:
    found = index.index_score(Q, KEYS, WEIGHTS, KLEN, 256)
    assert fake_neuron.calls == ["kernel"]
    assert list(fake_neuron.wrapped) == ["index_score.kernel"]
    assert fake_neuron.shapes == [[(6, 32, 128), (2, 128, N), (6, 32), (6,)]]
    torch.testing.assert_close(found, expected(256), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", ["switched off", "fp32", "16 heads", "no query"])
def test_what_does_not_suit_the_kernel_stays_in_torch(
    fake_neuron: FakeNeuron, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    q, weights, klen = Q[0], WEIGHTS[0], KLEN[0]
    if case == "fp32":
        q = q.float()
    if case == "16 heads":
        q, weights = q[:, :16], weights[:, :16]
    if case == "no query":
        q, weights, klen = q[:0], weights[:0], klen[:0]
    if case == "switched off":
        monkeypatch.setenv("DEEPINFER_NEURON_NKI_ATTN", "0")
    assert index.index_score(q, KEYS[0], weights, klen).shape == (len(q), N)
    assert fake_neuron.calls == []


def test_keys_that_are_not_stored_reach_no_entry() -> None:
    cache = torch.zeros(2, 128, 9, dtype=torch.bfloat16)
    keys = random(4, 128).bfloat16()
    index.store_keys(cache, keys, torch.tensor([0, 1, 1, 0]), torch.tensor([3, -1, 0, -1]))
    stored = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    stored[0, 3], stored[1, 0] = keys[0], keys[2]
    assert torch.equal(cache[:, :, :8].transpose(1, 2), stored)


@pytest.mark.parametrize("n", [1, 511, 512, 513, 2000])
def test_lists_are_exact_by_value_and_ascend(n: int) -> None:
    scores = random(2, 3, n).round(decimals=1)
    klen = torch.tensor([[0, 1, n], [n // 2, n, n - 1]])
    chosen = index.top_k_positions(scores.masked_fill(torch.arange(n) >= klen[..., None], torch.nan), klen, 512)
    assert chosen.shape == (2, 3, 512)
    assert chosen.dtype == torch.int32
    for row, length, found in zip(scores.flatten(0, 1), klen.flatten().tolist(), chosen.flatten(0, 1), strict=True):
        kept = found[: min(512, length)]
        assert (found[len(kept) :] == -1).all()
        assert (kept.diff() > 0).all()
        assert torch.equal(row[kept].sort(descending=True).values, row[:length].sort(descending=True).values[:512])


@pytest.mark.parametrize("count", [3, 4, 2048])
def test_only_entries_of_candidate_blocks_are_listed(count: int) -> None:
    scores, klen = random(2, 3, 61), torch.tensor([[61, 60, 33], [8, 1, 0]])
    blocks = index.candidate_blocks(scores, klen, count)
    chosen = index.top_k_positions(index.within_candidates(scores, blocks), klen, 512)
    for length, some, listed in zip(klen.flatten().tolist(), blocks.flatten(0, 1), chosen.flatten(0, 1), strict=True):
        entries = {8 * b + i for b in some.tolist() if b >= 0 for i in range(8)} & set(range(length))
        assert set(listed.tolist()) - {-1} == entries
        assert length == 0 or length - 1 in entries


def test_a_step_of_the_index_compiles_for_the_device_in_one_graph() -> None:
    def step(cache, keys, sequences, places, q, weights, klen):
        index.store_keys(cache, keys, sequences, places)
        scores = index.index_score(q, cache, weights, klen, 64)
        allowed = index.within_candidates(scores, index.candidate_blocks(scores, klen, 3))
        return index.top_k_positions(scores, klen, 16), index.top_k_positions(allowed, klen, 16)

    caches = [KEYS[:, :, :65].contiguous() for _ in range(2)]
    arguments = random(2, 128).bfloat16(), torch.tensor([0, 1]), torch.tensor([40, -1]), Q, WEIGHTS, KLEN.clamp(max=64)
    compiled = torch.compile(step, backend="deepinfer_neuron", options={"base_backend": "aot_eager"}, fullgraph=True)
    found, plain = compiled(caches[0], *arguments), step(caches[1], *arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert torch.equal(*caches)


def test_lists_of_candidates_are_those_of_the_mask(fake_neuron: FakeNeuron) -> None:
    n, klen = 296, torch.tensor([[0, 1, 296], [7, 200, 295]])
    keys = KEYS[:, :, :n]
    rows = keys.transpose(1, 2).contiguous()
    scores = index.index_score(Q, keys.contiguous(), WEIGHTS, klen)
    blocks = index.candidate_blocks(scores, klen, 9)
    found = index.candidate_scores(Q, rows, WEIGHTS, klen, blocks)
    assert list(fake_neuron.wrapped) == ["index_score.kernel", "index_candidates.kernel"]
    expected = index.top_k_positions(index.within_candidates(scores, blocks), klen, 40)
    assert torch.equal(index.top_k_candidates(found, blocks, 40), expected)


def test_candidates_on_a_host_and_of_broken_blocks_stay_in_torch() -> None:
    rows, klen = KEYS[0].transpose(0, 1), torch.tensor([5, 300, 256])
    assert not index.candidate_scores_supported(Q[0], rows)
    blocks = torch.tensor([[0, -1], [3, 31], [31, -1]])
    found = index.candidate_scores(Q[0], rows[:296], WEIGHTS[0], klen, blocks)
    scores = index.index_score(Q[0], KEYS[0], WEIGHTS[0], klen)
    expected = index.top_k_positions(index.within_candidates(scores, blocks), klen, 20)
    assert torch.equal(index.top_k_candidates(found, blocks, 20), expected)

"""Sparse attention: torch on a host, kernels on a device unless they are switched off or do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_prep.kernels import attention_reference, constants
from deepinfer_prep.runtime import attention
from tests.runtime.fake_neuron import FakeNeuron

GENERATOR = torch.Generator().manual_seed(0)
SCALE = 128**-0.5


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).bfloat16()


Q, KV, OTHER = random(2, 3, 8, 128), random(40, 128), random(30, 128)
SINK = random(8).float()
IDX = torch.randint(-3, 40, (2, 3, 9), generator=GENERATOR)
OTHER_IDX = torch.randint(-3, 30, (2, 3, 5), generator=GENERATOR)


def expected(idx: Tensor = IDX) -> Tensor:
    return attention_reference.sparse_attn(Q.flatten(0, 1), KV, SINK, idx.flatten(0, 1), SCALE).view(Q.shape)


def test_on_a_host_the_reference_computes() -> None:
    assert torch.equal(attention.sparse_attn(Q, KV, SINK, IDX, SCALE), expected())
    assert not attention.sparse_attn_supported(Q, KV, IDX)


def test_on_a_device_the_kernel_computes_whatever_leads(fake_neuron: FakeNeuron) -> None:
    found = attention.sparse_attn(Q, KV, SINK, IDX, SCALE)
    assert list(fake_neuron.wrapped) == ["sparse_attn.kernel"]
    assert attention.sparse_attn_supported(Q, KV, IDX)
    torch.testing.assert_close(found, expected(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("on_device", [True, False])
def test_each_sequence_may_have_a_cache_of_its_own(request: pytest.FixtureRequest, on_device: bool) -> None:
    if on_device:
        request.getfixturevalue("fake_neuron")
    caches = torch.stack([KV, KV.flip(0)])
    found = attention.sparse_attn(Q, caches, SINK, IDX, SCALE)
    turned = IDX.clone()
    turned[1] = torch.where(IDX[1] < 0, -1, 39 - IDX[1])
    torch.testing.assert_close(found, expected(turned), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("on_device", [True, False])
def test_entries_beyond_a_cache_are_empty(request: pytest.FixtureRequest, on_device: bool) -> None:
    if on_device:
        request.getfixturevalue("fake_neuron")
    beyond = torch.where(IDX < 0, 2**31 - 1, IDX)
    found = attention.sparse_attn(Q, KV, SINK, beyond, SCALE)
    assert torch.equal(found, attention.sparse_attn(Q, KV, SINK, IDX, SCALE))


@pytest.mark.parametrize("on_device", [True, False])
def test_two_caches_share_one_softmax(request: pytest.FixtureRequest, on_device: bool) -> None:
    fake = request.getfixturevalue("fake_neuron") if on_device else None
    found = attention.sparse_attn_two_caches(Q, KV, IDX, OTHER, OTHER_IDX, SINK, SCALE)
    idx = torch.cat([IDX, torch.where(OTHER_IDX < 0, -1, OTHER_IDX + 40)], dim=-1)
    one = attention_reference.sparse_attn(Q.flatten(0, 1), torch.cat([KV, OTHER]), SINK, idx.flatten(0, 1), SCALE).view(
        Q.shape
    )
    torch.testing.assert_close(found, one, rtol=2**-6, atol=2**-6)
    if fake is not None:
        assert list(fake.wrapped) == ["sparse_attn_two_caches.kernel"]


def test_many_queries_are_launched_in_turns(fake_neuron: FakeNeuron, monkeypatch: pytest.MonkeyPatch) -> None:
    together = attention.sparse_attn(Q, KV, SINK, IDX, SCALE)
    fake_neuron.shapes.clear()
    monkeypatch.setattr(constants, "M_MAX", 4)
    assert torch.equal(attention.sparse_attn(Q, KV, SINK, IDX, SCALE), together)
    assert [shapes[0][0] for shapes in fake_neuron.shapes] == [4, 2]


@pytest.mark.parametrize("case", ["switched off", "fp32", "empty", "many heads", "long lists", "narrow"])
def test_what_does_not_suit_the_kernel_stays_in_torch(
    fake_neuron: FakeNeuron, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    q, kv, idx, sink = Q, KV, IDX, SINK
    if case == "switched off":
        monkeypatch.setenv("DEEPINFER_NEURON_NKI_ATTN", "0")
    elif case == "fp32":
        q, kv = Q.float(), KV.float()
    elif case == "empty":
        q, idx = Q[:0], IDX[:0]
    elif case == "many heads":
        q, sink = random(2, 3, 65, 128), random(65).float()
    elif case == "long lists":
        idx = IDX.repeat(1, 1, 120)
    else:
        q, kv = random(2, 3, 8, 64), random(40, 64)
    found = attention.sparse_attn(q, kv, sink, idx, SCALE)
    assert found.shape == q.shape
    assert found.dtype == q.dtype
    assert fake_neuron.calls == []


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("history", [0, 128])
def test_a_dense_window_is_the_window_of_lists(request: pytest.FixtureRequest, on_device: bool, history: int) -> None:
    fake = request.getfixturevalue("fake_neuron") if on_device else None
    q, kv = random(70, 2, 128), random(128 + 70, 128)
    rows = torch.arange(128 + 70)
    present = torch.where(rows < 128 - history, -1, rows)
    lists = attention.prefill_window_lists(
        torch.zeros(70, dtype=torch.int32), torch.arange(70) + history, torch.tensor([history]), torch.tensor([0])
    )
    expected = attention_reference.sparse_attn(q, kv, SINK[:2], lists, SCALE)
    found = attention.window_attn(q, kv, present, SINK[:2], SCALE)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    assert fake is None or list(fake.wrapped) == ["window_attn.kernel"]


def test_a_dense_window_is_launched_in_turns(fake_neuron: FakeNeuron, monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv, present = random(130, 2, 128), random(128 + 130, 128), torch.zeros(128 + 130)
    together = attention.window_attn(q, kv, present, SINK[:2], SCALE)
    fake_neuron.shapes.clear()
    monkeypatch.setattr(constants, "M_MAX", 128)
    assert torch.equal(attention.window_attn(q, kv, present, SINK[:2], SCALE), together)
    assert [shapes[0][0] for shapes in fake_neuron.shapes] == [128, 64]

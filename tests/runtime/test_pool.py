"""The compressor's pool: torch on a host, a kernel on a device unless it is switched off or does not fit."""

from __future__ import annotations

import pytest
import torch

from deepinfer_prep.kernels import attention_reference as reference
from deepinfer_prep.runtime import pool
from tests.runtime.fake_neuron import FakeNeuron

SCORE, LATENT = torch.randn(2, 2, 3, 2, 128, generator=torch.Generator().manual_seed(0))


def test_on_a_host_the_reference_computes() -> None:
    assert not pool.compress_pool_supported(SCORE)
    wide = reference.pool_values(SCORE, LATENT, torch.float32)
    assert torch.equal(pool.compress_pool(SCORE, LATENT), wide.bfloat16())
    assert torch.equal(pool.compress_pool(SCORE, LATENT, torch.float32), wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_device_a_kernel_computes_whatever_leads(fake_neuron: FakeNeuron, dtype: torch.dtype) -> None:
    found = pool.compress_pool(SCORE, LATENT, dtype)
    assert list(fake_neuron.wrapped) == [
        "compress_pool.kernel" if dtype == torch.bfloat16 else "compress_pool_fp32.kernel"
    ]
    assert found.dtype == dtype
    assert found.shape == (2, 3, 128)
    expected = reference.pool_values(SCORE, LATENT, torch.float32).to(dtype)
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["switched off", "bf16", "empty", "200 tokens a group"])
def test_what_does_not_suit_the_kernel_stays_in_torch(
    fake_neuron: FakeNeuron, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    score = {
        "bf16": SCORE.bfloat16(),
        "empty": SCORE[:0],
        "200 tokens a group": SCORE.repeat(1, 1, 100, 1),
    }.get(case, SCORE)
    if case == "switched off":
        monkeypatch.setenv("DEEPINFER_NEURON_NKI_ATTN", "0")
    assert pool.compress_pool(score, score).shape == (*score.shape[:-2], 128)
    assert fake_neuron.calls == []


def test_a_compiled_graph_leaves_it_to_its_compiler(fake_neuron: FakeNeuron) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return pool.compress_pool(x, LATENT)

    found = torch.compile(step, backend="aot_eager", fullgraph=True)(SCORE)
    assert fake_neuron.calls == []
    torch.testing.assert_close(found, step(SCORE), rtol=2**-6, atol=2**-6)

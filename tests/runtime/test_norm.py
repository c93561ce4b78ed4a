"""RMS norm and SwiGLU: torch on a host, kernels on a device unless they are switched off or do not fit."""

from __future__ import annotations

import pytest
import torch

from deepinfer_prep.kernels import norm_reference
from deepinfer_prep.runtime import norm
from tests.runtime.fake_neuron import FakeNeuron

X = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
W = torch.randn(128, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_on_a_host_the_references_compute() -> None:
    assert torch.equal(norm.rmsnorm(X, W), norm_reference.rmsnorm(X, W))
    assert torch.equal(norm.swiglu(X, 2 * X), norm_reference.swiglu(X, 2 * X))
    assert not norm.rmsnorm_supported(X, 1e-20)
    assert not norm.swiglu_supported(X, 10.0)


def test_on_a_device_kernels_compute_whatever_leads(fake_neuron: FakeNeuron) -> None:
    normed, active = norm.rmsnorm(X, W), norm.swiglu(X, X.flip(-1))
    assert fake_neuron.calls == ["kernel", "kernel"]
    assert list(fake_neuron.wrapped) == ["rmsnorm.kernel", "swiglu.kernel"]
    for found, expected in ((normed, norm_reference.rmsnorm(X, W)), (active, norm_reference.swiglu(X, X.flip(-1)))):
        assert found.shape == X.shape
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-20)


def test_routing_weights_are_multiplied_in_before_the_rounding(fake_neuron: FakeNeuron) -> None:
    weight = torch.tensor([[0.3, 1.0, 0.0]])
    found = norm.swiglu(X, X, weight)
    assert torch.equal(found, (norm_reference.swiglu_values(X, X, torch.float32) * weight[..., None]).bfloat16())
    assert fake_neuron.calls == []


@pytest.mark.parametrize("case", ["switched off", "fp32", "empty"])
def test_what_does_not_suit_the_kernels_stays_in_torch(
    fake_neuron: FakeNeuron, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    x = {"fp32": X.float(), "empty": X[:, :0]}.get(case, X)
    if case == "switched off":
        monkeypatch.setenv("DEEPINFER_NEURON_NKI_NORM", "0")
    assert torch.equal(norm.rmsnorm(x, W), norm_reference.rmsnorm(x, W))
    assert torch.equal(norm.swiglu(x, x), norm_reference.swiglu(x, x))
    assert fake_neuron.calls == []


def test_only_the_baked_constants_are_supported(fake_neuron: FakeNeuron) -> None:
    assert norm.rmsnorm_supported(X, 1e-20)
    assert not norm.rmsnorm_supported(X, 1e-6)
    assert not norm.rmsnorm_supported(X.new_empty(1, 8193), 1e-20)
    assert norm.swiglu_supported(X, 10.0)
    assert not norm.swiglu_supported(X, 7.0)


def test_a_compiled_graph_leaves_it_to_its_compiler(fake_neuron: FakeNeuron) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return norm.rmsnorm(x, W) + norm.swiglu(x, x)

    found = torch.compile(step, backend="aot_eager", fullgraph=True)(X)
    assert fake_neuron.calls == []
    torch.testing.assert_close(found, step(X), rtol=2**-6, atol=2**-6)

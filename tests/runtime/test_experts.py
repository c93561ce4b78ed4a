"""Experts: three GEMMs on a host, one launch on a device unless something does not fit."""

from __future__ import annotations

import pytest
import torch

from deepinfer_prep import kernel_layout
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.kernels import expert_reference
from deepinfer_prep.quantized import Element
from deepinfer_prep.runtime import experts, gemm, norm
from deepinfer_prep.runtime.attributes import KERNEL_ORDER, KERNEL_SCALE, KERNEL_WEIGHT
from tests.runtime.fake_neuron import FakeNeuron
from tests.runtime.models import Layer, e8m0, fp8, random_codes

K, H, N = 128, 256, 512
ON, OFF = (torch.tensor([[flag]], dtype=torch.int32) for flag in (1, 0))


def fp4_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    model = Layer(random_codes(*shape[:-1], shape[-1] // 2, seed=seed).view(torch.int8))
    generator = torch.Generator().manual_seed(seed)
    model.weight.sf = torch.randint(118, 124, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
    assert gemm.prepare_model(model) == 1
    return model.weight


def fp8_weight(n: int, k: int) -> torch.Tensor:
    model = Layer(fp8(random_codes(n, k, highest=0x76)))
    model.weight.sf = e8m0(n // 32, k // 32)
    assert gemm.prepare_model(model) == 1
    return model.weight


def in_kernel_order(w: torch.Tensor, element: Element = "e2m1") -> torch.Tensor:
    """The same weight as loading from the kernels' layout attaches it."""
    content = getattr(w, KERNEL_WEIGHT)
    ordered = torch.from_numpy(kernel_layout.weight_to_kernel_order(content.numpy(), element))
    moved = ordered.flatten()
    setattr(moved, KERNEL_ORDER, BandedWeight(tuple(content.shape), element))
    setattr(moved, KERNEL_WEIGHT, ordered)
    setattr(moved, KERNEL_SCALE, getattr(w, KERNEL_SCALE))
    return moved


def weights(h: int = H) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return fp4_weight(h, K, seed=1), fp4_weight(h, K, seed=2), fp4_weight(N, h, seed=3)


X = torch.randn(3, K, generator=torch.Generator().manual_seed(4)).bfloat16()
WEIGHT = torch.tensor([0.5, 1.5, 0.0])


def expected(three: tuple[torch.Tensor, ...], weight: torch.Tensor) -> torch.Tensor:
    operands = [getattr(w, name) for w in three for name in (KERNEL_WEIGHT, KERNEL_SCALE)]
    return expert_reference.fp4_expert(X, *operands, weight.unsqueeze(-1))


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.double() - wanted.double()).norm() <= 2.0**-8 * wanted.double().norm()


def test_on_a_host_an_expert_is_its_steps() -> None:
    three = weights()
    assert not experts.expert_supported(X, *three)
    assert torch.equal(experts.expert(X, *three, WEIGHT), expected(three, WEIGHT))
    hidden = norm.swiglu(gemm.linear_qdq(X, three[0]), gemm.linear_qdq(X, three[1]))
    plain = experts.expert(X, *three)
    assert torch.equal(plain, gemm.linear_qdq(hidden, three[2]))
    assert torch.equal(experts.expert_gated(X, *three, ON), plain)
    assert not experts.expert_gated(X, *three, OFF).any()


def test_on_a_device_an_expert_is_one_launch(fake_neuron: FakeNeuron) -> None:
    three = weights()
    found = experts.expert(X, *three, WEIGHT)
    assert list(fake_neuron.wrapped) == ["fp4_expert.kernel"]
    assert fake_neuron.calls == ["kernel"]
    assert_near(found, expected(three, WEIGHT))
    assert not found[2].any()


def test_the_gated_kernel_gives_zeros_or_the_expert(fake_neuron: FakeNeuron) -> None:
    three = weights()
    assert torch.equal(experts.expert_gated(X, *three, ON, WEIGHT), experts.expert(X, *three, WEIGHT))
    assert not experts.expert_gated(X, *three, OFF, WEIGHT).any()
    assert set(fake_neuron.wrapped) == {"fp4_expert.kernel", "fp4_expert_gated.kernel"}


def test_a_group_is_one_expert_of_stacked_weights(fake_neuron: FakeNeuron) -> None:
    stacked = fp4_weight(2, H, K, seed=5), fp4_weight(2, H, K, seed=6), fp4_weight(2, N, H, seed=7)
    for group in range(2):
        single = []
        for w in stacked:
            model = Layer(w.data[group])
            model.weight.sf = w.sf[group]
            gemm.prepare_model(model)
            single.append(model.weight)
        assert torch.equal(experts.expert(X, *stacked, WEIGHT, group), experts.expert(X, *single, WEIGHT))


def test_many_rows_are_launched_in_turns(fake_neuron: FakeNeuron) -> None:
    three = weights()
    x = X.repeat(171, 1)
    found = experts.expert(x, *three, WEIGHT.repeat(171))
    assert [shapes[0] for shapes in fake_neuron.shapes] == [(512, K), (1, K)]
    assert_near(found[-3:], expected(three, WEIGHT))


@pytest.mark.parametrize("case", ["switched off", "two cores off", "unlike", "h = 320", "no row", "kernels' order"])
def test_what_does_not_suit_the_kernel_takes_its_steps(
    fake_neuron: FakeNeuron, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    three, x = weights(320 if case == "h = 320" else H), X
    if case == "unlike":
        three = fp8_weight(H, K), three[1], fp8_weight(N, H)
    if case == "kernels' order":
        setattr(three[1], KERNEL_ORDER, True)
    if case == "no row":
        x = X[:0]
    if case == "switched off":
        monkeypatch.setenv("DEEPINFER_NEURON_NKI_GEMM", "0")
    if case == "two cores off":
        monkeypatch.setenv("DEEPINFER_NEURON_BQ_2CORE", "0")
    assert not experts.expert_supported(x, *three)
    assert experts.expert(x, *three).shape == (len(x), N)
    assert not any("expert" in name for name in fake_neuron.wrapped)


def test_an_fp8_expert_is_one_launch_too_and_its_gate_is_applied_behind_it(fake_neuron: FakeNeuron) -> None:
    three = fp8_weight(H, K), fp8_weight(H, K), fp8_weight(N, H)
    operands = [getattr(w, name) for w in three for name in (KERNEL_WEIGHT, KERNEL_SCALE)]
    wanted = expert_reference.fp8_expert(X, *operands, WEIGHT.unsqueeze(-1))
    found = experts.expert(X, *three, WEIGHT)
    assert_near(found, wanted)
    moved = [in_kernel_order(w, "e4m3") for w in three]
    assert_near(experts.expert(X, *moved, WEIGHT), wanted)
    assert torch.equal(experts.expert_gated(X, *three, ON, WEIGHT), found)
    assert not experts.expert_gated(X, *three, OFF, WEIGHT).any()
    assert set(fake_neuron.wrapped) == {"fp8_expert.kernel", "fp8_expert_kmajor.kernel"}


def test_weights_in_the_kernels_order_have_a_kernel_of_their_own(fake_neuron: FakeNeuron) -> None:
    three = weights()
    moved = [in_kernel_order(w) for w in three]
    found = experts.expert(X, *moved, WEIGHT)
    assert list(fake_neuron.wrapped) == ["fp4_expert_kmajor.kernel"]
    assert_near(found, expected(three, WEIGHT))
    assert torch.equal(experts.expert_gated(X, *moved, ON, WEIGHT), found)
    assert not experts.expert_supported(X, moved[0], *three[1:])
    assert_near(experts.expert(X, moved[0], *three[1:], WEIGHT), expected(three, WEIGHT))


def test_on_a_host_the_order_of_weights_makes_no_difference() -> None:
    three = weights()
    moved = [in_kernel_order(w) for w in three]
    assert torch.equal(experts.expert(X, *moved, WEIGHT), experts.expert(X, *three, WEIGHT))

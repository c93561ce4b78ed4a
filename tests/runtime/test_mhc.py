"""Hyper-connections: the arithmetic against a plain float64 statement of it, on a host and in the emulator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepinfer_prep.errors import PrepError, RefusedError
from deepinfer_prep.fp8 import NoExactResultError
from deepinfer_prep.kernels import reference
from deepinfer_prep.runtime import mhc, neuron
from tests.runtime.fake_neuron import FakeNeuron
from tests.runtime.models import frozen

HC, H = 4, 256
KERNELS = ("hc_expand", "hc_mixes", "hc_collapse", "hc_attn_out")
GENERATOR = torch.Generator().manual_seed(0)


def residual(*lead: int) -> torch.Tensor:
    return torch.randn(*lead, HC, H, generator=torch.Generator().manual_seed(1)).bfloat16()


def parameters() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fn, scale, base."""
    generator = torch.Generator().manual_seed(2)
    fn = frozen(torch.randn((2 + HC) * HC, HC * H, generator=generator) / (HC * H) ** 0.5)
    return fn, torch.tensor([0.5, 1.5, 1.0]), torch.randn((2 + HC) * HC, generator=generator)


def stated_mixes(
    x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition, token by token in float64."""
    flat = x.double().reshape(-1, HC * H)
    pre, post, comb = [], [], []
    for row in flat:
        logits = fn.double() @ row / (row.square().mean() + 1e-20).sqrt()
        parts = [logits[:HC] * scale[0], logits[HC : 2 * HC] * scale[1], logits[2 * HC :] * scale[2]]
        first, second, third = (part + b for part, b in zip(parts, base.double().split([HC, HC, HC * HC]), strict=True))
        pre.append(1 / (1 + (-first).exp()) + 1e-6)
        post.append(2 / (1 + (-second).exp()))
        matrix = third.view(HC, HC).softmax(-1) + 1e-6
        matrix = matrix / (matrix.sum(0, keepdim=True) + 1e-6)
        for _ in range(19):
            matrix = matrix / (matrix.sum(1, keepdim=True) + 1e-6)
            matrix = matrix / (matrix.sum(0, keepdim=True) + 1e-6)
        comb.append(matrix)
    lead = x.shape[:-2]
    return (
        torch.stack(pre).view(*lead, HC, 1),
        torch.stack(post).view(*lead, HC, 1),
        torch.stack(comb).view(*lead, HC, HC),
    )


def assert_mixes(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == torch.float32
        assert result.shape == wanted.shape
        assert (result.double() - wanted).abs().max() <= 1e-5


def assert_bf16(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding to bf16 and the float32 accumulation before it."""
    assert result.dtype == torch.bfloat16
    assert result.shape == expected.shape
    assert ((result.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()


# Splitting


def test_split_is_within_its_bound_over_all_magnitudes():
    exponents = torch.arange(-126, 127).float()
    fn = torch.exp2(exponents) * (1 + torch.rand(64, len(exponents), generator=GENERATOR))
    fn = torch.cat([fn, -fn, torch.zeros(1, len(exponents))])
    hi, lo = mhc.split_fn(fn)
    assert hi.dtype == lo.dtype == torch.bfloat16
    assert torch.equal(hi, fn.bfloat16())
    assert torch.equal(lo, (fn - hi.float()).bfloat16())
    assert (
        (fn.double() - hi.double() - lo.double()).abs() <= (2.0**-17 * fn.double().abs()).clamp(min=2.0**-134)
    ).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -3.4e38])
def test_values_without_halves_are_refused(value):
    fn = torch.zeros(4, 4)
    fn[1, 2] = value
    with pytest.raises(NoExactResultError, match=r"element 6 .* not finite in bf16"):
        mhc.split_fn(fn)


def test_prepare_model_splits_what_it_should():
    model = nn.Module()
    model.hc_attn_fn = frozen(torch.randn(24, 8))
    model.layer = nn.Module()
    model.layer.hc_ffn_fn = frozen(torch.randn(24, 8).t().contiguous().t())
    model.tied = model.layer
    model.hc_head_fn = frozen(torch.randn(4, 8))
    model.hc_attn_base = frozen(torch.randn(24))
    model.low = nn.Module()
    model.low.hc_attn_fn = frozen(torch.randn(24, 8).bfloat16())
    assert mhc.prepare_model(model) == 2
    for fn in (model.hc_attn_fn, model.layer.hc_ffn_fn):
        assert torch.equal(fn._nki_fn_hi, fn.bfloat16())
        assert torch.equal(fn._nki_fn_lo, (fn - fn._nki_fn_hi.float()).bfloat16())
    assert not hasattr(model.hc_head_fn, "_nki_fn_hi")
    assert not hasattr(model.low.hc_attn_fn, "_nki_fn_hi")


def test_prepare_model_names_every_broken_matrix_and_attaches_nothing():
    model = nn.ModuleList(nn.Module() for _ in range(3))
    for index, part in enumerate(model):
        part.hc_ffn_fn = frozen(torch.full((2, 2), float("nan") if index else 1.0))
    with pytest.raises(RefusedError) as caught:
        mhc.prepare_model(model)
    assert "1.hc_ffn_fn: element 0 is nan" in str(caught.value)
    assert "2.hc_ffn_fn" in str(caught.value)
    assert not hasattr(model[0].hc_ffn_fn, "_nki_fn_hi")


# On a host


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_mixes(lead):
    x, (fn, scale, base) = residual(*lead), parameters()
    assert_mixes(mhc.mixes(x, fn, scale, base), stated_mixes(x, fn, scale, base))


def test_mixes_of_zero_rows_are_finite():
    fn, scale, base = parameters()
    x = torch.zeros(3, HC, H, dtype=torch.bfloat16)
    assert_mixes(mhc.mixes(x, fn, scale, base), stated_mixes(x, fn, scale, base))


def test_two_matmuls_of_halves_are_as_good_as_one_in_fp32():
    x, (fn, scale, base) = residual(5), parameters()
    results = mhc.mixes_of_halves(x, *mhc.split_fn(fn), scale, base)
    assert_mixes(
        tuple(r.view(e.shape) for r, e in zip(results, stated_mixes(x, fn, scale, base), strict=True)),
        stated_mixes(x, fn, scale, base),
    )
    # Operands narrowed to bf16, as the compiler does, change nothing: they are exact in it already.
    narrow = torch.nn.functional.linear(x.flatten(-2).float(), fn.bfloat16().float())
    wide = torch.nn.functional.linear(x.flatten(-2).double(), fn.double())
    assert (narrow - wide).abs().max() > 1e-3


@pytest.mark.parametrize("hc", [4, 2])
def test_expand(hc):
    hidden = residual(2, 3)[..., 0, :]
    result = mhc.expand(hidden, hc)
    assert result.shape == (2, 3, hc, H)
    assert all(torch.equal(result[..., index, :], hidden) for index in range(hc))
    assert result.is_contiguous()


@pytest.mark.parametrize("trailing", [True, False])
def test_pre_apply_mix_and_post(trailing):
    x, (fn, scale, base) = residual(2, 3), parameters()
    pre, out, comb = mhc.mixes(x, fn, scale, base)
    if not trailing:
        pre, out = pre.squeeze(-1), out.squeeze(-1)
    collapsed = mhc.pre_apply_mix(x, pre)
    assert_bf16(collapsed, (pre.reshape(2, 3, HC, 1).double() * x.double()).sum(-2))
    result = mhc.post(collapsed, x, out, comb)
    fresh = out.reshape(2, 3, HC, 1).double() * collapsed.double().unsqueeze(-2)
    kept = torch.einsum("abij,abih->abjh", comb.double(), x.double())
    assert_bf16(result, fresh + kept)


def test_pre_big_fuse():
    x, (fn, scale, base) = residual(3), parameters()
    pre, out, comb = mhc.mixes(x, fn, scale, base)
    fused = mhc.pre_big_fuse(x, fn, scale, base)
    for result, expected in zip(fused, (out, comb, mhc.pre_apply_mix(x, pre)), strict=True):
        assert torch.equal(result, expected)


def test_nothing_is_supported_on_a_host():
    assert not mhc.expand_supported(residual(2)[:, 0], 4)
    assert not mhc.mixes_supported(residual(2), 1e-20, 1e-6, 1e-6, 2.0, 20)


def block(x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    out, comb, layer_input = mhc.pre_big_fuse(x, fn, scale, base)
    return mhc.post(layer_input * 2, x, out, comb)


def test_host_path_is_one_graph():
    x, (fn, scale, base) = residual(3), parameters()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, fn, scale, base), block(x, fn, scale, base))


# On a device: the real kernels in the emulator


def test_kernels_on_the_device(fake_neuron: FakeNeuron):
    x, (fn, scale, base) = residual(2, 3), parameters()
    assert mhc.expand_supported(x[..., 0, :], HC)
    expanded = mhc.expand(x[..., 0, :], HC)
    assert torch.equal(expanded, x[..., :1, :].expand(2, 3, HC, H))
    pre, out, comb = mhc.mixes(x, fn, scale, base)
    assert_mixes((pre, out, comb), stated_mixes(x, fn, scale, base))
    collapsed = mhc.pre_apply_mix(x, pre)
    assert_bf16(collapsed, (pre.double() * x.double()).sum(-2))
    result = mhc.post(collapsed, x, out, comb)
    kept = torch.einsum("abij,abih->abjh", comb.double(), x.double())
    assert_bf16(result, out.double() * collapsed.double().unsqueeze(-2) + kept)
    assert fake_neuron.wrapped == {f"{name}.kernel": 1 for name in KERNELS}
    assert fake_neuron.grids == {f"{name}.kernel": (2,) for name in KERNELS}


def test_one_core_where_a_logical_core_has_one(fake_neuron: FakeNeuron, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    x, (fn, scale, base) = residual(3), parameters()
    pre, out, comb = mhc.mixes(mhc.expand(x[:, 0], HC), fn, scale, base)
    mhc.post(mhc.pre_apply_mix(x, pre), x, out, comb)
    assert fake_neuron.grids == {f"{name}.kernel": (1,) for name in KERNELS}


def test_constants_that_the_kernel_bakes(fake_neuron: FakeNeuron):
    x, asked = residual(2), [1e-20, 1e-6, 1e-6, 2.0, 20]
    assert mhc.mixes_supported(x, *asked)
    for position in range(5):
        other = list(asked)
        other[position] *= 2
        assert not mhc.mixes_supported(x, *other)
    assert not mhc.mixes_supported(x.float(), *asked)
    assert not mhc.mixes_supported(x[:, :2], *asked)


def test_kernels_can_be_turned_off(fake_neuron: FakeNeuron, monkeypatch):
    monkeypatch.setenv("DEEPINFER_NEURON_NKI_HC", "0")
    x, (fn, scale, base) = residual(3), parameters()
    assert not mhc.expand_supported(x[:, 0], HC)
    assert not mhc.mixes_supported(x, 1e-20, 1e-6, 1e-6, 2.0, 20)
    assert_mixes(mhc.mixes(x, fn, scale, base), stated_mixes(x, fn, scale, base))
    mhc.post(mhc.pre_apply_mix(mhc.expand(x[:, 0], HC), torch.ones(3, HC)), x, torch.ones(3, HC), torch.ones(3, HC, HC))
    assert fake_neuron.calls == []


def test_no_tokens_and_narrow_streams_run_in_torch(fake_neuron: FakeNeuron):
    fn, scale, base = parameters()
    assert mhc.mixes(residual(0), fn, scale, base)[2].shape == (0, HC, HC)
    assert mhc.pre_apply_mix(residual(0), torch.ones(0, HC)).shape == (0, H)
    assert mhc.expand(residual(0)[:, 0], HC).shape == (0, HC, H)
    narrow = residual(3)[..., :24]
    assert not mhc.mixes_supported(narrow, 1e-20, 1e-6, 1e-6, 2.0, 20)
    mhc.mixes(narrow, frozen(fn[:, : HC * 24].contiguous()), scale, base)
    assert fake_neuron.calls == []


@pytest.mark.parametrize("hc", [2, 3])
def test_other_stream_counts_run_in_torch(fake_neuron: FakeNeuron, hc):
    x = residual(3)[:, :hc]
    assert torch.equal(mhc.expand(x[:, 0], hc)[:, 1], x[:, 0])
    assert_bf16(mhc.pre_apply_mix(x, torch.ones(3, hc)), x.double().sum(-2))
    assert fake_neuron.calls == []


def test_matrix_that_changed_is_split_anew(fake_neuron: FakeNeuron):
    x, (fn, scale, base) = residual(2), parameters()
    mhc.mixes(x, fn, scale, base)
    first = fn._nki_fn_hi
    mhc.mixes(x, fn, scale, base)
    assert fn._nki_fn_hi is first
    with torch.no_grad():
        fn.mul_(-1)
    assert_mixes(mhc.mixes(x, fn, scale, base), stated_mixes(x, fn, scale, base))


def test_halves_that_a_loader_attached_are_used(fake_neuron: FakeNeuron):
    x, (fn, scale, base) = residual(2), parameters()
    fn._nki_fn_hi, fn._nki_fn_lo = mhc.split_fn(-fn.data)
    assert_mixes(mhc.mixes(x, fn, scale, base), stated_mixes(x, -fn, scale, base))


def test_copy_without_halves_is_split_when_it_is_used(fake_neuron: FakeNeuron):
    x, (fn, scale, base) = residual(2), parameters()
    mhc.mixes(x, fn, scale, base)
    other = copy.deepcopy(fn)
    assert_mixes(mhc.mixes(x, other, scale, base), stated_mixes(x, fn, scale, base))


def test_compiling_for_a_device_without_halves_is_an_error(monkeypatch):
    monkeypatch.setattr(neuron, "holds", lambda tensor: True)
    monkeypatch.setenv("DEEPINFER_NEURON_NKI_HC", "0")
    x, (fn, scale, base) = residual(2), parameters()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"mhc\.prepare_model\(model\) before compiling") as caught:
        compiled(x, fn, scale, base)
    assert "PrepError" in f"{type(caught.value).__name__} {caught.value}" or isinstance(caught.value, PrepError)
    fn._nki_fn_hi, fn._nki_fn_lo = mhc.split_fn(fn)
    torch._dynamo.reset()
    assert_bf16(
        torch.compile(block, backend="eager", fullgraph=True)(x, fn, scale, base), block(x, fn, scale, base).double()
    )


def test_constants_agree_with_the_reference():
    assert (reference.HC, reference.SINKHORN_ITERS, reference.HC_EPS, reference.NORM_EPS) == (4, 20, 1e-6, 1e-20)


def test_matrices_made_in_inference_mode_are_split() -> None:
    with torch.inference_mode():
        fn = torch.randn(24, 16)
        hi, lo = mhc._halves(fn)
        assert mhc._halves(fn)[0] is hi
        assert torch.equal(hi, fn.to(torch.bfloat16))
        assert torch.equal(lo, (fn - hi.float()).to(torch.bfloat16))

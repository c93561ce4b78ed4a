"""The hyper-connection kernels against their references in float64."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from nki_emulator import Options, installed, run

from tests.kernels.cases import ON_SIMULATOR, reference

with installed():
    from deepinfer_prep.kernels import hc_attn_out, hc_collapse, hc_expand, hc_mixes

TOKENS = (1, 3, 16, 32, 64, 128, 200, 512)
FILLS = ("random", "zeros", "negative zeros", "outlier", "large", "tiny", "near the eps")

every_grid = pytest.mark.parametrize("grid", [1, 2])
every_fill = pytest.mark.parametrize("fill", FILLS)
every_count = pytest.mark.parametrize("tokens", TOKENS)


def streams(tokens: int, h: int, fill: str) -> torch.Tensor:
    """A residual trunk bf16 [tokens, 4, h]."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 4, h, generator=generator)
    if fill == "zeros":
        x[: (tokens + 1) // 2] = 0.0
    elif fill == "negative zeros":
        x = torch.where(x > 0.5, x, -0.0)
    elif fill == "outlier":
        x *= 2.0**-12
        x[:, 1, h // 2] = 3e4
    elif fill in ("large", "tiny", "near the eps"):
        x *= {"large": 2.0**40, "tiny": 2.0**-60, "near the eps": 2.0**-33}[fill]
    return x.to(torch.bfloat16)


def bf16_ratio(y: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> float:
    """Largest error in units of one bf16 rounding plus fp32 noise on the terms."""
    allowed = 2.0**-8 * exact.abs() + 2.0**-20 * magnitude + 2.0**-126
    return float(((y.double() - exact).abs() / allowed).max())


@every_count
@every_grid
def test_expand_copies_bits(tokens: int, grid: int) -> None:
    hidden = streams(tokens, 192, "negative zeros")[:, 0].contiguous()
    out = run(hc_expand.kernel, hidden, grid=grid).output
    assert torch.equal(out.view(torch.int16), reference.hc_expand(hidden).view(torch.int16))


@every_count
@every_fill
def test_collapse(tokens: int, fill: str) -> None:
    x, mix = streams(tokens, 320, fill), torch.rand(tokens, 4) * 2 - 0.5
    terms = mix.double().unsqueeze(-1) * x.double()
    out = run(hc_collapse.kernel, x, mix).output
    assert bf16_ratio(out, terms.sum(1), terms.abs().sum(1)) <= 1.0
    assert torch.equal(out, run(hc_collapse.kernel, x, mix, grid=2).output)


@every_count
@every_fill
def test_attn_out(tokens: int, fill: str) -> None:
    residual = streams(tokens, 256, fill)
    x = streams(tokens, 256, "random")[:, 2].contiguous()
    post, comb = torch.rand(tokens, 4) * 2, torch.rand(tokens, 4, 4)
    fresh = post.double().unsqueeze(-1) * x.double().unsqueeze(1)
    kept = comb.double().unsqueeze(-1) * residual.double().unsqueeze(2)
    out = run(hc_attn_out.kernel, x, residual, post, comb).output
    assert bf16_ratio(out, fresh + kept.sum(1), fresh.abs() + kept.abs().sum(1)) <= 1.0
    assert torch.equal(out, run(hc_attn_out.kernel, x, residual, post, comb, grid=2).output)


def mixing(h: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """fn_hi, fn_lo, scale and base of a layer."""
    generator = torch.Generator().manual_seed(h)
    fn = torch.randn(24, 4 * h, generator=generator) / (4 * h) ** 0.5
    hi = fn.to(torch.bfloat16)
    lo = (fn - hi.float()).to(torch.bfloat16)
    return hi, lo, torch.tensor([0.8, 1.2, 1.5]), torch.randn(24, generator=generator)


@every_count
@every_fill
def test_mixes_within_1e_5(tokens: int, fill: str) -> None:
    residual, (hi, lo, scale, base) = streams(tokens, 96, fill), mixing(96)
    results = run(hc_mixes.kernel, residual, hi, lo, scale, base).outputs
    exact = reference.mixes(residual, hi.double() + lo.double(), scale, base, torch.float64)
    for result, expected in zip(results, exact, strict=True):
        assert result.dtype == torch.float32
        assert (result.double() - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("tokens", [1, 2, 129, 700])
def test_mixes_on_two_cores_agree_with_one(tokens: int) -> None:
    """Up to the order of fp32 sums, which TensorE leaves open: half the tokens are another matmul."""
    arguments = streams(tokens, 64, "random"), *mixing(64)
    one = run(hc_mixes.kernel, *arguments).outputs
    two = run(hc_mixes.kernel, *arguments, grid=2).outputs
    assert all((a - b).abs().max() <= 2e-6 for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("h", [32, 160, 1280, 5120])
def test_mixes_of_other_widths(h: int) -> None:
    residual, (hi, lo, scale, base) = streams(2, h, "random"), mixing(h)
    results = run(hc_mixes.kernel, residual, hi, lo, scale, base).outputs
    exact = reference.mixes(residual, hi.double() + lo.double(), scale, base, torch.float64)
    assert all((a.double() - b).abs().max() <= 1e-5 for a, b in zip(results, exact, strict=True))


def test_an_infinite_token_leaves_the_others_alone() -> None:
    residual, weights = streams(5, 64, "random"), mixing(64)
    expected = run(hc_mixes.kernel, residual, *weights).outputs
    residual[2, 1, 3] = torch.inf
    others = [0, 1, 3, 4]
    results = run(hc_mixes.kernel, residual, *weights).outputs
    assert all(torch.equal(a[others], b[others]) for a, b in zip(results, expected, strict=True))


@pytest.mark.skipif(ON_SIMULATOR, reason="AWS's simulator flushes no subnormals")
@every_fill
def test_flushing_subnormals_changes_no_mix(fill: str) -> None:
    arguments = streams(5, 64, fill), *mixing(64)
    kept = run(hc_mixes.kernel, *arguments).outputs
    flushed = run(hc_mixes.kernel, *arguments, options=Options(flush_subnormals=True)).outputs
    assert all(torch.equal(a, b) for a, b in zip(kept, flushed, strict=True))


@pytest.mark.parametrize("module", [hc_expand, hc_collapse, hc_attn_out, hc_mixes], ids=lambda module: module.__name__)
def test_modules_bake_the_reference_constants(module: ModuleType) -> None:
    function = getattr(reference, module.__name__.rsplit(".", 1)[-1])
    assert list(inspect.signature(module.kernel).parameters) == list(inspect.signature(function).parameters)
    assert reference.HC == module.HC
    for name in ("SINKHORN_ITERS", "HC_EPS", "NORM_EPS"):
        assert getattr(module, name, getattr(reference, name)) == getattr(reference, name)


def test_mixes_name_every_constant() -> None:
    assert (hc_mixes.HC, hc_mixes.SINKHORN_ITERS, hc_mixes.HC_EPS, hc_mixes.NORM_EPS) == (4, 20, 1e-6, 1e-20)

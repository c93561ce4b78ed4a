"""The pool kernel against float64; one core and two agree bit for bit."""

from __future__ import annotations

import pytest
import torch
from nki_emulator import Options, installed, run

from deepinfer_prep.kernels import attention_reference as reference
from tests.kernels.cases import ON_SIMULATOR

with installed():
    from deepinfer_prep.kernels import compress_pool, compress_pool_fp32

RATIOS = (1, 2, 3, 4, 128)
FILLS = ("random", "far apart", "equal", "one certain", "zeros")


def groups(count: int, ratio: int, width: int, fill: str = "random") -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and latents fp32 [count, ratio, width]."""
    generator = torch.Generator().manual_seed(count + ratio + width)
    score, latent = torch.randn(2, count, ratio, width, generator=generator)
    if fill == "far apart":
        score *= 1e4
    elif fill == "equal":
        score[:] = 1e4
    elif fill == "one certain":
        score[:, 1:] = -torch.inf
    elif fill == "zeros":
        score.zero_()
        latent.zero_()
    return score, latent


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2)."""
    x, y = found.double().flatten(), exact.double().flatten()
    return float(1 - 2 * (x @ y) / (x @ x + y @ y))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("count", "width"), [(1, 512), (3, 128), (9, 384), (130, 66)])
def test_pool(count: int, width: int, ratio: int, fill: str) -> None:
    score, latent = groups(count, ratio, width, fill)
    exact = reference.pool_values(score, latent, torch.float64)
    magnitude = reference.pool_values(score, latent.abs(), torch.float64)
    noise = 2.0**-20 * magnitude + 2.0**-126
    wide = run(compress_pool_fp32.kernel, score, latent).output
    assert wide.dtype == torch.float32
    assert ((wide.double() - exact).abs() <= noise).all()
    found = run(compress_pool.kernel, score, latent).output
    assert torch.equal(found, wide.bfloat16())
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + noise).all()
    assert torch.equal(found, run(compress_pool.kernel, score, latent, grid=2).output)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("width", [128, 384, 512, 3072, 4096])
def test_the_distance_to_the_reference_is_below_what_the_official_tests_allow(width: int, ratio: int) -> None:
    score, latent = groups(6, ratio, width)
    found = run(compress_pool.kernel, score, latent, grid=2).output
    assert distance(found, reference.compress_pool(score, latent)) < 1e-8


@pytest.mark.parametrize("ratio", [2, 4])
def test_latents_far_apart_and_infinite_ones_without_a_share(ratio: int) -> None:
    score, latent = groups(2, ratio, 64)
    latent[0] = torch.tensor([1e30, -1e-30, 1e20, 3.0])[:ratio].unsqueeze(-1)
    score[1, 1:] = -1e4
    exact = reference.pool_values(score, latent, torch.float64)
    magnitude = reference.pool_values(score, latent.abs(), torch.float64)
    found = run(compress_pool_fp32.kernel, score, latent).output
    assert ((found.double() - exact).abs() <= 2.0**-20 * magnitude).all()


@pytest.mark.parametrize("ratio", [2, 5])
def test_nan_stays_in_its_group_and_channel(ratio: int) -> None:
    score, latent = groups(4, ratio, 64)
    sound = run(compress_pool.kernel, score, latent).output
    score[1, 1, 7], latent[2, 0, 9] = torch.nan, torch.nan
    found = run(compress_pool.kernel, score, latent).output
    assert found.isnan().nonzero().tolist() == [[1, 7], [2, 9]]
    assert torch.equal(found[~found.isnan()], sound[~found.isnan()])


@pytest.mark.skipif(ON_SIMULATOR, reason="flushing is an option of the emulator")
@pytest.mark.parametrize("ratio", [2, 4])
def test_flushed_subnormals_change_nothing_beyond_the_bound(ratio: int) -> None:
    score, latent = groups(3, ratio, 128, "far apart")
    kept = run(compress_pool.kernel, score, latent).output
    flushed = run(compress_pool.kernel, score, latent, options=Options(flush_subnormals=True)).output
    torch.testing.assert_close(flushed, kept, rtol=0, atol=2.0**-120)

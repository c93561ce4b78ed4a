"""RMS norm and SwiGLU kernels against float64; one core and two agree bit for bit."""

from __future__ import annotations

import pytest
import torch
from nki_emulator import Options, installed, run

from deepinfer_prep.kernels import norm_reference
from tests.kernels.cases import ON_SIMULATOR

with installed():
    from deepinfer_prep.kernels import rmsnorm, swiglu

FILLS = ("random", "zeros", "tiny", "large", "spike")
BF16, NOISE = 2.0**-8, 2.0**-20


def rows(tokens: int, columns: int, fill: str) -> torch.Tensor:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
    if fill == "zeros":
        x[: (tokens + 1) // 2] = 0.0
    elif fill in ("tiny", "large", "near the eps"):
        x *= {"tiny": 1e-12, "large": 1e10, "near the eps": 1e-10}[fill]
    elif fill == "spike":
        x[:, columns // 2] = 3e4
    return x.bfloat16()


@pytest.mark.parametrize("fill", [*FILLS, "near the eps"])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 5120), (2, 128), (3, 512), (128, 100), (200, 320), (512, 128)])
def test_norm(tokens: int, columns: int, fill: str) -> None:
    x, weight = rows(tokens, columns, fill), rows(1, columns, "random")[0]
    exact = norm_reference.rmsnorm_values(x, weight, torch.float64)
    out = run(rmsnorm.kernel, x, weight).output
    assert ((out.double() - exact).abs() <= BF16 * exact.abs()).all()
    assert torch.equal(out, run(rmsnorm.kernel, x, weight, grid=2).output)


def test_errors_of_fp32_ahead_of_the_one_rounding_need_no_room_of_their_own() -> None:
    """Half a step of bf16 is 2^-8 |y| / (1 + 2^-8) at most, at the first tie above a power of two.

    What is left, 2^-16, is more than fp32 can be off: even a value that an error pushed over a tie stays in the bound.
    """
    ties = 1 + (2 * torch.arange(128, dtype=torch.float64) + 1) * 2.0**-8
    for side in (1, -1):
        computed = torch.nextafter(ties.float(), torch.tensor(2.0 if side == 1 else 0.0))
        exact = computed.double() * (1 - side * 2.0**-17)
        rounded = computed.bfloat16().double()
        assert ((rounded - exact) * side > 0).all()
        assert ((rounded - exact).abs() <= BF16 * exact).all()


@pytest.mark.parametrize("fill", [*FILLS, "far"])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 2304), (3, 64), (16, 96), (64, 288), (128, 256), (200, 64)])
def test_swiglu(tokens: int, columns: int, fill: str) -> None:
    gate, up = rows(tokens, columns, fill), rows(tokens + 1, columns, "random")[1:] * 8
    if fill == "far":
        gate = gate * 200
    exact = norm_reference.swiglu_values(gate, up, torch.float64)
    out = run(swiglu.kernel, gate, up).output
    assert ((out.double() - exact).abs() <= BF16 * exact.abs() + NOISE).all()
    assert torch.equal(out, run(swiglu.kernel, gate, up, grid=2).output)


def test_a_row_with_nan_or_infinity_does_not_reach_another() -> None:
    x, weight = rows(5, 128, "random"), rows(1, 128, "random")[0]
    spoilt = x.clone()
    spoilt[1, 7], spoilt[3, 9] = torch.nan, torch.inf
    sound = [0, 2, 4]
    assert torch.equal(run(rmsnorm.kernel, spoilt, weight).output[sound], run(rmsnorm.kernel, x, weight).output[sound])
    assert torch.equal(run(swiglu.kernel, spoilt, x).output[sound], run(swiglu.kernel, x, x).output[sound])


@pytest.mark.skipif(ON_SIMULATOR, reason="flushing is an option of the emulator")
def test_flushed_subnormals_change_nothing_beyond_the_bound() -> None:
    x, weight = rows(4, 128, "tiny"), rows(1, 128, "random")[0]
    options = Options(flush_subnormals=True)
    assert torch.equal(run(rmsnorm.kernel, x, weight, options=options).output, run(rmsnorm.kernel, x, weight).output)

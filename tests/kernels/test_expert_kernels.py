"""An expert in one launch against its steps as kernels, bit for bit, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nki_emulator import installed, run

from deepinfer_prep.kernels import expert_reference
from tests.kernels.cases import GEMMS, ON_SIMULATOR, Gemm, blockquant, make_case
from tests.kernels.models import gemm_model
from tests.kernels.small_models import expert_model, shared_expert_model

with installed():
    from deepinfer_prep.kernels import (
        fp4_expert,
        fp4_expert_gated,
        fp4_expert_kmajor,
        fp4_expert_kmajor_gated,
        fp8_expert,
        fp8_expert_kmajor,
        swiglu,
    )

NAMES = ("fp4_linear", "fp4_linear_kmajor", "fp8_linear", "fp8_linear_kmajor")
FP4, FP4_KMAJOR, FP8, FP8_KMAJOR = (next(gemm for gemm in GEMMS if gemm.name == name) for name in NAMES)
K, H, N = 384, 512, 256


def arguments(m: int, gemm: Gemm = FP4) -> list[torch.Tensor]:
    """x, three weights with their scales, and routing weights."""
    cases = make_case(gemm, m, H, K), make_case(gemm, m, H, K, "all codes"), make_case(gemm, m, N, H)
    weight = torch.rand(m, 1, generator=torch.Generator().manual_seed(m)) + 0.5
    return [cases[0].x, *(one for case in cases for one in case.arguments[1:]), weight]


@pytest.mark.parametrize("m", [1, 3, 16, 32, 130])
def test_one_launch_gives_what_its_steps_give(m: int) -> None:
    x, gate, gate_scale, up, up_scale, down, down_scale, weight = arguments(m)
    weight[:] = 1.0
    gated = run(blockquant.fp4_linear, x, gate, gate_scale).output
    hidden = run(swiglu.kernel, gated, run(blockquant.fp4_linear, x, up, up_scale).output).output
    expected = run(blockquant.fp4_linear, hidden, down, down_scale).output
    found = run(fp4_expert.kernel, x, gate, gate_scale, up, up_scale, down, down_scale, weight).output
    assert torch.equal(found, expected)
    assert expected.abs().max() > 0


@pytest.mark.parametrize("m", [1, 16, 130])
def test_two_cores_agree_with_one_and_with_the_reference(m: int) -> None:
    case = arguments(m)
    found = run(fp4_expert.kernel, *case).output
    assert torch.equal(found, run(fp4_expert.kernel, *case, grid=2).output)
    expected = expert_reference.fp4_expert(*case)
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 2.0**-8


@pytest.mark.parametrize("m", [1, 130])
def test_routing_weights_are_multiplied_in_before_the_last_gemm(m: int) -> None:
    case = arguments(m)
    found = run(fp4_expert.kernel, *case).output
    case[-1] = case[-1] * 2
    doubled = run(fp4_expert.kernel, *case).output
    assert torch.equal(doubled, 2 * found)


@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize(("flag", "on"), [(1, True), (0, False), (7, False), (-1, False)])
def test_the_gate_leaves_all_of_it_out(flag: int, on: bool, grid: int) -> None:
    case = arguments(3)
    found = run(fp4_expert_gated.kernel, *case, torch.tensor([[flag]], dtype=torch.int32), grid=grid)
    expected = run(fp4_expert.kernel, *case).output
    assert torch.equal(found.output, expected if on else torch.zeros_like(expected))
    read = [one for one in found.instructions or () if one.op == "nc_matmul"]
    assert bool(read) == on or ON_SIMULATOR


@pytest.mark.skipif(ON_SIMULATOR, reason="AWS's simulator keeps no record of instructions")
def test_v41s_expert_fits_on_chip_and_costs_what_its_gemms_cost() -> None:
    model = expert_model(128)
    parts = [gemm_model(FP4, 128, *shape) for shape in ((2304, 5120), (2304, 5120), (5120, 2304))]
    assert model.cost.bound == pytest.approx(sum(part.cost.bound for part in parts), rel=0.05)


def test_the_reference_skips_what_the_flag_leaves_out() -> None:
    case = arguments(3)
    off, on = (torch.tensor([[flag]], dtype=torch.int32) for flag in (0, 1))
    assert not expert_reference.fp4_expert_gated(*case, off).any()
    assert torch.equal(expert_reference.fp4_expert_gated(*case, on), expert_reference.fp4_expert(*case))


@pytest.mark.parametrize("m", [1, 32, 130])
def test_weights_in_the_kernel_layout_give_what_their_steps_give(m: int) -> None:
    case = arguments(m, FP4_KMAJOR)
    x, gate, gate_scale, up, up_scale, down, down_scale, weight = case
    weight[:] = 1.0
    gated = run(blockquant.fp4_linear_kmajor, x, gate, gate_scale).output
    hidden = run(swiglu.kernel, gated, run(blockquant.fp4_linear_kmajor, x, up, up_scale).output).output
    expected = run(blockquant.fp4_linear_kmajor, hidden, down, down_scale).output
    assert torch.equal(run(fp4_expert_kmajor.kernel, *case).output, expected)
    assert torch.equal(run(fp4_expert_kmajor.kernel, *case, grid=2).output, expected)
    on, off = (torch.tensor([[flag]], dtype=torch.int32) for flag in (1, 0))
    assert torch.equal(run(fp4_expert_kmajor_gated.kernel, *case, on, grid=2).output, expected)
    assert not run(fp4_expert_kmajor_gated.kernel, *case, off, grid=2).output.any()


@pytest.mark.parametrize("m", [1, 16, 130])
@pytest.mark.parametrize(("gemm", "expert"), [(FP8, fp8_expert), (FP8_KMAJOR, fp8_expert_kmajor)])
def test_an_fp8_expert_gives_what_its_steps_give(gemm: Gemm, expert: Any, m: int) -> None:
    case = arguments(m, gemm)
    x, gate, gate_scale, up, up_scale, down, down_scale, weight = case
    reference = expert_reference.fp8_expert(*arguments(m, FP8)).double()
    found = run(expert.kernel, *case).output
    assert (found.double() - reference).norm() < 2.0**-8 * reference.norm()
    weight[:] = 1.0
    linear = getattr(blockquant, gemm.name)
    gated = run(linear, x, gate, gate_scale).output
    hidden = run(swiglu.kernel, gated, run(linear, x, up, up_scale).output).output
    expected = run(linear, hidden, down, down_scale).output
    assert torch.equal(run(expert.kernel, *case).output, expected)
    assert torch.equal(run(expert.kernel, *case, grid=2).output, expected)
    assert expected.abs().max() > 0


@pytest.mark.skipif(ON_SIMULATOR, reason="AWS's simulator keeps no record of instructions")
@pytest.mark.parametrize("gemm", [FP8, FP8_KMAJOR])
def test_v41s_shared_expert_fits_on_chip_and_costs_what_its_gemms_cost(gemm: Gemm) -> None:
    model = shared_expert_model(16, is_kmajor=gemm is FP8_KMAJOR)
    parts = [gemm_model(gemm, 16, *shape) for shape in ((2304, 5120), (2304, 5120), (5120, 2304))]
    assert model.cost.bound == pytest.approx(sum(part.cost.bound for part in parts), rel=0.05)

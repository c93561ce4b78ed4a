"""The kernels' source keeps the language's rules, and their modelled cost the limits that decided the design."""

from __future__ import annotations

from pathlib import Path

import pytest
from nki_emulator import Options, TensorSpec, count, run
from nki_emulator.lint import lint_file

import deepinfer_prep.kernels
from tests.kernels.cases import GEMMS, ON_SIMULATOR, Gemm
from tests.kernels.models import V41_FP4, V41_FP8, gemm_model, hyper_connection_models

emulator_only = pytest.mark.skipif(ON_SIMULATOR, reason="AWS's simulator keeps no record of instructions")

SOURCES = sorted(Path(deepinfer_prep.kernels.__path__[0]).glob("*.py"))
QUICK = ("wq_a", "wkv", "shared w2", "routed w1, w3", "routed w2")
"""Weights small enough to model in the suite; scripts/kernel_cost.py does all."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_source_passes_the_lint(path: Path) -> None:
    assert lint_file(path) == []


def test_lint_sees_every_kernel_module() -> None:
    names = {path.stem for path in SOURCES}
    assert {"blockquant", "gemm_fp8", "gemm_fp4", "gemm_block128", "hc_mixes", "tiles", "few_rows"} <= names


def weights_of(gemm: Gemm) -> list[tuple[str, int, int]]:
    weights = V41_FP4 if gemm.codes_per_byte == 2 else V41_FP8
    return [(name, n, k) for name, (n, k) in weights.items() if name in QUICK]


@emulator_only
@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_decode_stays_near_the_memory_floor_on_two_cores(gemm: Gemm, m: int) -> None:
    limit = 8.5 if gemm.codes_per_byte == 2 else 3.5
    for name, n, k in weights_of(gemm):
        model = gemm_model(gemm, m, n, k)
        assert model.ratio <= limit, f"{name}: {model.cell()}"


@emulator_only
def test_decode_of_fp8_weights_is_bound_by_tensor_engine_or_memory() -> None:
    """With one to four rows nothing touches every weight but TensorE and DMA."""
    for name, n, k in weights_of(GEMMS[0]):
        model = gemm_model(GEMMS[0], 1, n, k)
        assert model.cost.bound_by in ("tensor", "dma", "hbm"), f"{name}: {model.cell()}"
        assert model.ratio <= 1.3, f"{name}: {model.cell()}"


@emulator_only
def test_two_cores_halve_the_time() -> None:
    n, k = V41_FP8["wq_a"]
    one, two = (gemm_model(GEMMS[0], 16, n, k, cores).cost.bound for cores in (1, 2))
    assert 1.7 <= one / two <= 2.1


@emulator_only
def test_weights_are_read_once() -> None:
    n, k = V41_FP8["wkv"]
    model = gemm_model(GEMMS[0], 128, n, k)
    x_and_y = 2 * 128 * (k + n // 2)
    read = model.cost.slowest.seconds["hbm"] * 2.9e12 / 8
    assert read <= n * k / 2 * 1.05 + x_and_y


@emulator_only
def test_hyper_connection_kernels_are_modelled() -> None:
    models = hyper_connection_models(16)
    assert set(models) == {"hc_expand", "hc_collapse", "hc_attn_out", "hc_mixes"}
    assert all(0 < model.cost.bound < 50e-6 for model in models.values())


@emulator_only
def test_the_pessimistic_column_counts_slow_stationaries_and_is_never_below_the_best() -> None:
    n, k = V41_FP8["wq_a"]
    model = gemm_model(GEMMS[0], 1, n, k)
    matmuls = n // 2 // 128 * (k // 256) * 2
    extra = model.pessimistic.slowest.seconds["tensor"] - model.cost.slowest.seconds["tensor"]
    assert extra == pytest.approx(matmuls * 64 / 2.4e9)
    assert model.pessimistic_ratio >= model.ratio
    assert model.pessimistic.slowest.seconds["sync"] > 0


@emulator_only
@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize("gemm", [gemm for gemm in GEMMS if gemm.kernel_layout], ids=lambda gemm: gemm.name)
def test_the_kernel_layout_stays_near_the_floor_pessimistically_too(gemm: Gemm, m: int) -> None:
    limit = (4.3 if m <= 4 else 7.0) if gemm.codes_per_byte == 2 else 1.8
    for name, n, k in weights_of(gemm):
        model = gemm_model(gemm, m, n, k)
        assert model.pessimistic_ratio <= limit, f"{name}: {model.cell()}"


@emulator_only
def test_kernels_for_the_kernel_layout_transpose_no_weight() -> None:
    """What they transpose is x, scales and results: far fewer tiles than the weight has."""
    gemm = next(gemm for gemm in GEMMS if gemm.name == "fp8_linear_raw_kmajor")
    n, k = V41_FP8["wq_a"]
    specs = TensorSpec((1, k), "bfloat16"), TensorSpec((n, k), "uint8"), TensorSpec((n // 32, k // 32), "uint8")
    record = run(gemm.kernel(1), *specs, options=Options(arithmetic=False)).instructions
    assert record is not None
    assert count(record, "nc_transpose") <= 40
    assert all(i.operand("stationary").inner_step == 1 for i in record if i.op == "nc_matmul")


@emulator_only
def test_a_chain_of_dependent_instructions_costs_its_latencies_pessimistically() -> None:
    mixes = hyper_connection_models(1)["hc_mixes"]
    extra = mixes.pessimistic.slowest.seconds["vector"] - mixes.cost.slowest.seconds["vector"]
    assert extra >= 100 * 100 / 0.96e9

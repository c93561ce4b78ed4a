"""Figures that follow from 256 counts against the same figures computed element by element with ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from deepinfer_prep import fp8
from deepinfer_prep.report.byte_counts import count_each_code
from deepinfer_prep.report.codes import halved_figures, halving_decibels, source_figures

E4M3FN, E4M3 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3
ALL_CODES = np.arange(256, dtype=np.uint8)


def random_codes(seed: int = 0, spread: float = 90.0) -> fp8.U8:
    values = np.random.default_rng(seed).standard_normal(50_000) * spread
    codes = np.clip(values, -448, 448).astype(E4M3FN).view(np.uint8)
    return np.concatenate([codes, ALL_CODES])


def elementwise(codes: fp8.U8) -> tuple[npt.NDArray[np.float64], dict[str, npt.NDArray[np.float64]]]:
    """The finite values, and what each way makes of them."""
    stored = codes.view(E4M3FN)
    values = stored.astype(np.float64)
    finite = np.isfinite(values)
    halved = (values / 2).astype(E4M3FN).astype(np.float64) * 2
    scaled = (stored.astype(np.float32) * np.float32(240 / 448)).astype(ml_dtypes.bfloat16)
    recipe = scaled.astype(E4M3FN).astype(np.float64) * (448 / 240)
    return values[finite], {
        "halving": halved[finite],
        "recipe": recipe[finite],
        "clipping": np.clip(values, -240, 240)[finite],
    }


@pytest.mark.parametrize("spread", [0.01, 1.0, 90.0])
def test_figures_of_a_source_are_those_of_its_elements(spread: float) -> None:
    codes = random_codes(spread=spread)
    figures = source_figures(count_each_code(codes))
    values, after = elementwise(codes)
    on_hardware = codes.view(E4M3).astype(np.float64)
    stored = codes.view(E4M3FN).astype(np.float64)
    assert figures.codes == codes.size
    assert figures.nan == np.isnan(stored).sum()
    assert figures.above_240 == (np.isfinite(stored) & ~np.isfinite(on_hardware)).sum()
    assert figures.rounded == (after["halving"] != values).sum()
    assert figures.changed is not None
    assert figures.decibels is not None
    for way, made in after.items():
        assert getattr(figures.changed, way) == (made != values).sum()
        ratio = 10 * math.log10((values**2).sum() / ((made - values) ** 2).sum())
        assert getattr(figures.decibels, way) == pytest.approx(ratio, rel=1e-9)


def test_a_way_that_changes_nothing_has_no_finite_ratio() -> None:
    figures = source_figures(count_each_code(np.full(8, 0x38, dtype=np.uint8)))
    assert figures.decibels is not None
    assert figures.decibels.halving is None
    assert figures.decibels.clipping is None
    assert figures.decibels.recipe is not None


def test_the_recipe_changes_nine_values_in_ten() -> None:
    figures = source_figures(count_each_code(random_codes()))
    assert figures.changed is not None
    assert 0.88 < (figures.changed.recipe or 0) / figures.codes < 0.92


def test_halves_tell_what_lay_above_240_in_the_source() -> None:
    codes = random_codes()
    before = source_figures(count_each_code(codes))
    halves = np.empty_like(codes)
    fp8.halve(codes, halves)
    after = halved_figures(count_each_code(halves))
    assert after.brought_into_range == before.above_240
    assert after.above_240 == 0
    assert (after.codes, after.nan) == (before.codes, before.nan)


def test_the_ratio_of_halving_follows_from_halves_and_the_number_of_rounded_codes() -> None:
    codes = random_codes()
    before = source_figures(count_each_code(codes))
    halves = np.empty_like(codes)
    fp8.halve(codes, halves)
    assert before.decibels is not None
    assert before.rounded is not None
    ratio = halving_decibels(count_each_code(halves), before.rounded)
    assert ratio == pytest.approx(before.decibels.halving, abs=1e-4)
    assert halving_decibels(count_each_code(halves), 0) is None

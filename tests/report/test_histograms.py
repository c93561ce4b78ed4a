"""Counts of codes and of scale exponents against NumPy's and ml_dtypes' own."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from deepinfer_prep.files import segments
from deepinfer_prep.files.container import Location, read_header
from deepinfer_prep.report import byte_counts
from deepinfer_prep.report.byte_counts import count_each_code, count_in_pairs
from deepinfer_prep.report.histograms import count_scales, count_tensors
from deepinfer_prep.workers import Progress
from tests.small_files import write_file


@pytest.mark.parametrize("size", [0, 1, 2, 8191, 8192, 8193, 65537, 1048575, 1048576, 2_000_001])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_every_code_is_counted_at_any_size_and_alignment(size: int, offset: int) -> None:
    codes = np.random.default_rng(size).integers(0, 256, size + offset, dtype=np.uint8)[offset:]
    expected = np.array([np.count_nonzero(codes == code) for code in range(256)])
    assert np.array_equal(count_each_code(codes), expected)
    assert np.array_equal(count_in_pairs(codes), expected)


def test_without_pillow_numpy_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_counts, "HAS_PILLOW", False)
    monkeypatch.delattr(byte_counts, "_count_as_picture")
    assert count_each_code(np.full(3_000_001, 7, dtype=np.uint8))[7] == 3_000_001


def test_one_code_alone_is_counted_in_full() -> None:
    codes = np.full(1_000_001, 0xFF, dtype=np.uint8)
    assert count_each_code(codes).nonzero()[0].tolist() == [255]
    assert count_each_code(codes)[255] == 1_000_001


def test_exponents_of_e8m0_scales_are_those_of_their_values() -> None:
    counts = count_scales(np.array([0, 127, 127, 130, 254, 255], dtype=np.uint8), "F8_E8M0")
    assert counts.by_exponent() == {-127: 1, 0: 2, 3: 1, 127: 1}
    assert (counts.other, counts.all_powers) == (1, False)
    values = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    everything = count_scales(np.arange(255, dtype=np.uint8), "F8_E8M0")
    assert everything.by_exponent() == dict.fromkeys(np.log2(values).astype(int).tolist(), 1)
    assert everything.all_powers


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"), [("F32", "<f4"), ("F64", "<f8"), ("F16", "<f2"), ("BF16", ml_dtypes.bfloat16)]
)
def test_exponents_of_float_scales_are_those_of_their_values(dtype: str, numpy_dtype: str) -> None:
    values = np.array([1.0, 1.5, 1.9375, 0.25, 3.0, 0.0, -1.0, np.inf, np.nan], dtype=numpy_dtype)
    counts = count_scales(values.view(np.uint8), dtype)
    assert counts.by_exponent() == {-2: 1, 0: 3, 1: 1}
    assert (counts.other, counts.all_powers) == (4, False)
    powers = np.array([2.0, 0.5, 2.0**-14], dtype=numpy_dtype)
    assert count_scales(powers.view(np.uint8), dtype).all_powers
    assert not count_scales(np.array([2.0, 3.0], dtype=numpy_dtype).view(np.uint8), dtype).all_powers


def test_tensors_are_counted_whole_however_they_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1000)
    random = np.random.default_rng(5)
    first, second = (random.integers(0, 256, size, dtype=np.uint8) for size in (4321, 77))
    scale = random.random(501, dtype=np.float32)
    path = write_file(
        tmp_path / "model.safetensors",
        {
            "first": ("F8_E4M3", (4321,), first.tobytes()),
            "scale": ("F32", (501,), scale.tobytes()),
            "empty": ("F8_E4M3", (0, 4), b""),
            "second": ("F8_E4M3", (77,), second.tobytes()),
        },
    )
    header = read_header(path)
    located = {tensor.name: Location(path, header.data_start, tensor) for tensor in header.tensors}
    steps: list[Progress] = []
    found = {
        counts.name: counts
        for counts in count_tensors(
            [located[name] for name in ("first", "second", "empty")], [located["scale"]], 3, 64, steps.append
        )
    }
    assert found.keys() == located.keys()
    for name, codes in (("first", first), ("second", second), ("empty", first[:0])):
        counts = found[name].codes
        assert counts is not None
        assert np.array_equal(counts, np.bincount(codes, minlength=256))
    scales = found["scale"].scales
    assert scales is not None
    assert scales.by_exponent() == dict(zip(*np.unique(np.floor(np.log2(scale)), return_counts=True), strict=True))
    assert steps[-1].done == steps[-1].total == 4321 + 77 + 4 * 501

"""The kernel layout: where each byte goes, that nothing is lost, and what a rank reads."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import float4_e2m1fn, float8_e4m3, float8_e5m2

from deepinfer_prep import kernel_layout
from deepinfer_prep.kernel_layout import Band
from deepinfer_prep.quantized import Element

SIZES = (
    (1, 8),
    (32, 128),
    (96, 13),
    (288, 64),
    (512, 2304),
    (640, 72),
    (1280, 136),
    (1056, 40),
    (2304, 16),
    (64, 3075),
)


def some_bytes(n: int, row_bytes: int) -> kernel_layout.U8:
    return np.random.default_rng(n + row_bytes).integers(0, 256, (n, row_bytes), dtype=np.uint8)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (96, [Band(0, 96)]),
        (544, [Band(0, 512), Band(512, 32)]),
        (256, [Band(0, 128), Band(128, 128)]),
        (1280, [Band(0, 512), Band(512, 128), Band(640, 512), Band(1152, 128)]),
        (1056, [Band(0, 512), Band(512, 512), Band(1024, 32)]),
        (2048, [Band(0, 512), Band(512, 512), Band(1024, 512), Band(1536, 512)]),
    ],
)
def test_bands_cover_the_rows_and_none_belongs_to_both_cores(n: int, expected: list[Band]) -> None:
    assert list(kernel_layout.bands(n)) == expected


@pytest.mark.parametrize(("n", "row_bytes"), SIZES)
def test_every_fp8_byte_lies_where_the_formula_says(n: int, row_bytes: int) -> None:
    stored = some_bytes(n, row_bytes)
    flat = kernel_layout.weight_to_kernel_order(stored, "e4m3").reshape(-1)
    for band in kernel_layout.bands(n):
        row, column = np.meshgrid(np.arange(band.first, band.end), np.arange(row_bytes), indexing="ij")
        place = band.first * row_bytes + column * band.rows + (row - band.first)
        assert np.array_equal(flat[place], stored[band.first : band.end])


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
@pytest.mark.parametrize(("n", "row_bytes"), SIZES)
def test_the_stored_bytes_come_back(n: int, row_bytes: int, element: Element) -> None:
    stored = some_bytes(n, row_bytes)
    there = kernel_layout.weight_to_kernel_order(stored, element)
    assert there.shape == stored.shape
    assert np.array_equal(kernel_layout.weight_to_stored_order(there, element), stored)


def test_both_codes_of_an_fp4_byte_come_out_with_one_shift_and_one_mask() -> None:
    stored = np.arange(256, dtype=np.uint8).reshape(1, 256)
    kernel = kernel_layout.weight_to_kernel_order(stored, "e2m1").reshape(-1)
    low = ((kernel << 1) & 0x8E).view(float8_e5m2).astype(np.float32) * 2.0**14
    high = ((kernel.view(np.int8) >> 1).view(np.uint8) & 0x9C).view(float8_e4m3).astype(np.float32) * 2.0**6
    codes = stored.reshape(-1)
    assert np.array_equal(low, (codes & 15).view(float4_e2m1fn).astype(np.float32))
    assert np.array_equal(high, (codes >> 4).view(float4_e2m1fn).astype(np.float32))
    assert np.array_equal(np.signbit(low), codes & 8 > 0)
    assert np.array_equal(np.signbit(high), codes & 128 > 0)


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
@pytest.mark.parametrize(("n", "row_bytes"), SIZES)
def test_a_rank_of_columns_reads_its_part_alone_and_has_a_whole_weight(
    n: int, row_bytes: int, element: Element
) -> None:
    stored = some_bytes(n, row_bytes)
    flat = kernel_layout.weight_to_kernel_order(stored, element).reshape(-1)
    first, end = row_bytes // 8, row_bytes // 2 + 1
    runs = kernel_layout.slice_runs(n, row_bytes, (0, n), (first, end))
    assert sum(run.length for run in runs) == n * (end - first)
    read = np.concatenate([flat[run.offset : run.offset + run.length] for run in runs])
    part = kernel_layout.weight_to_kernel_order(np.ascontiguousarray(stored[:, first:end]), element)
    assert np.array_equal(read, part.reshape(-1))


@pytest.mark.parametrize(("first", "end"), [(0, 512), (160, 320), (600, 1200), (1279, 1280)])
def test_a_rank_of_rows_finds_its_rows_in_the_bands_that_it_reads(first: int, end: int) -> None:
    n, row_bytes = 1280, 64
    stored = some_bytes(n, row_bytes)
    flat = kernel_layout.weight_to_kernel_order(stored, "e4m3").reshape(-1)
    parts = []
    for run in kernel_layout.slice_runs(n, row_bytes, (first, end), (8, 64)):
        read = flat[run.offset : run.offset + run.length].reshape(run.columns, run.band.rows)
        parts.append(read[:, run.first_row : run.end_row].T)
    assert np.array_equal(np.concatenate(parts), stored[first:end, 8:64])


def test_an_empty_slice_needs_no_run() -> None:
    assert kernel_layout.slice_runs(512, 64, (5, 5), (0, 64)) == ()
    assert kernel_layout.slice_runs(512, 64, (0, 512), (8, 8)) == ()
    assert kernel_layout.bands(0) == ()

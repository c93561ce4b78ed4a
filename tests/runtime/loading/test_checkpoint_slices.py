"""Parts of tensors: the right bytes, no more of them than needed, and scales in step with their weights."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.runtime.loading import byte_layout, transfers
from deepinfer_prep.runtime.loading.byte_layout import ByteRuns, FileLayout
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.open_files import OpenFiles
from deepinfer_prep.runtime.loading.slices import Grid, Slice, SliceError, bounds_of, in_step, shape_of, share
from deepinfer_prep.runtime.loading.tensor_file import TensorFile
from deepinfer_prep.runtime.loading.transfers import Fill, fill_transfers
from tests.runtime import prepared
from tests.runtime.prepared import same_bytes

Bounds = tuple[tuple[int, int], ...]
TENSORS = {
    "w.weight": prepared.fp8((1000, 200), 1),
    "w.scale": prepared.e8m0((32, 7), 1),
    "rows.weight": prepared.fp8((200, 8192), 2),
    "rows.scale": prepared.e8m0((7, 256), 2),
    "fp4.weight": prepared.fp4((72, 48), 3),
    "fp4.scale": prepared.e8m0((72, 3), 3),
    "bias": prepared.f32((1000,), 4),
    "conv": prepared.f32((2, 3, 4, 5), 5),
    "experts.weight": prepared.fp8((5, 96, 64), 6),
    "experts.scale": prepared.e8m0((5, 3, 2), 6),
    "x.hc_attn_fn": prepared.f32((24, 64), 7),
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared.prepare(tmp_path_factory.mktemp("slices"), TENSORS)


@pytest.fixture(scope="module", params=["mmap", "pread"])
def opened(request: pytest.FixtureRequest, output: Path) -> Iterator[PreparedCheckpoint]:
    with PreparedCheckpoint(output, access=request.param) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def expected(output: Path) -> dict[str, torch.Tensor]:
    return prepared.stored(output)


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Bounds]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    bounds = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        bounds.append((start, draw(st.integers(start + 1, size))))
    return shape, draw(st.sampled_from([1, 2, 4])), tuple(bounds)


def array_slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(*bound) for bound in bounds)


@given(parts(), st.integers(1, 64), st.integers(0, 5))
def test_pieces_tile_a_part_in_order_and_hold_its_bytes(
    part: tuple[tuple[int, ...], int, Bounds], limit: int, start: int
) -> None:
    shape, item, bounds = part
    size = math.prod(shape) * item
    addresses = np.arange(start, start + size).reshape(*shape, item)
    found = []
    for region, narrowed in FileLayout(start, shape, item).pieces(bounds, limit):
        runs = [np.arange(region.run) + region.start + number * region.stride for number in range(region.count)]
        wanted = addresses[array_slices(narrowed)].reshape(-1)
        assert np.array_equal(np.concatenate(runs), wanted)
        assert region.bytes_to_read <= max(limit, item)
        found.append(wanted)
    assert np.array_equal(np.concatenate(found), addresses[array_slices(bounds)].reshape(-1))


@settings(max_examples=60)
@given(parts(), st.booleans(), st.sampled_from([1, 4096]))
def test_transfers_fill_any_part_through_small_steps(
    part: tuple[tuple[int, ...], int, Bounds], transposed: bool, page: int
) -> None:
    shape, item, bounds = part
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]
    data = torch.randint(0, 120, shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(shape_of(bounds), dtype=dtype)
    if transposed:
        out = torch.zeros(shape_of(bounds)[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    with tempfile.NamedTemporaryFile() as written, pytest.MonkeyPatch.context() as patch:
        written.write(b"xyz" + data.numpy().tobytes())
        written.flush()
        patch.setattr(transfers, "LIMIT_BYTES", 16)
        # With pages of one byte every run is read on its own.
        patch.setattr(byte_layout, "PAGE_BYTES", page)
        with closing(TensorFile(Path(written.name), 3 + data.nbytes, OpenFiles())) as file:
            for step in fill_transfers([Fill(file, FileLayout(3, shape, item), bounds, out)]):
                assert step.run(np.empty(32, np.uint8)) >= step.nbytes
    assert torch.equal(out, data[array_slices(bounds)])


@pytest.mark.parametrize(
    ("name", "part", "index"),
    [
        ("w.weight", Slice(rows=(7, 999)), np.s_[7:999]),
        ("w.weight", Slice(columns=(13, 200)), np.s_[:, 13:200]),
        ("w.weight", Slice(rows=(5, 6), columns=(3, 4)), np.s_[5:6, 3:4]),
        ("w.weight", Slice(rows=(9, 9)), np.s_[9:9]),
        ("rows.weight", Slice(columns=(4096, 8192)), np.s_[:, 4096:]),
        ("bias", Slice(rows=(1, 1000)), np.s_[1:]),
        ("experts.weight", Slice(experts=(2, 4)), np.s_[2:4]),
        ("experts.weight", Slice(experts=(1, 5), rows=(3, 90)), np.s_[1:5, 3:90]),
        ("experts.weight", Slice(experts=(0, 5), rows=(3, 90), columns=(1, 63)), np.s_[:, 3:90, 1:63]),
        ("x.hc_attn_fn", Slice(columns=(32, 64)), np.s_[:, 32:]),
        ("conv", Slice(), np.s_[:]),
    ],
)
def test_parts_are_what_indexing_the_whole_tensor_gives(
    opened: PreparedCheckpoint,
    expected: dict[str, torch.Tensor],
    name: str,
    part: Slice,
    index: tuple[slice, ...],
) -> None:
    wanted = expected[name].view(torch.uint8)[index] if "weight" in name else expected[name][index]
    found = opened.read(name, part)
    assert found.is_contiguous()
    assert torch.equal(found.view(wanted.dtype), wanted)
    strided = torch.zeros(*found.shape[:-1], found.shape[-1] * 2, dtype=found.dtype)[..., ::2]
    assert same_bytes(opened.read(name, part, out=strided), found)


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("w.weight", Slice(rows=(0, 1001)), "rows 0 to 1001 do not lie"),
        ("w.weight", Slice(rows=(5, 4)), "rows 5 to 4"),
        ("w.weight", Slice(columns=(-1, 4)), "columns -1 to 4"),
        ("w.weight", Slice(experts=(0, 1)), "has no experts"),
        ("bias", Slice(columns=(0, 1)), "has no columns"),
        ("conv", Slice(rows=(0, 1)), "has no rows"),
    ],
)
def test_parts_outside_a_tensor_are_refused(opened: PreparedCheckpoint, name: str, part: Slice, words: str) -> None:
    with pytest.raises(SliceError, match=words) as caught:
        opened.read(name, part)
    assert name in str(caught.value)


def test_a_row_part_reads_its_own_bytes(output: Path) -> None:
    checkpoint = PreparedCheckpoint(output, access="pread")
    checkpoint.read("rows.weight", Slice(rows=(32, 64)))
    assert checkpoint.bytes_read == 32 * 8192


def test_column_parts_of_a_page_read_their_own_bytes(output: Path) -> None:
    checkpoint = PreparedCheckpoint(output)
    checkpoint.read("rows.weight", Slice(columns=(4096, 8192)))
    assert checkpoint.bytes_read == 200 * 4096


def test_column_parts_below_a_page_read_whole_rows(output: Path) -> None:
    checkpoint = PreparedCheckpoint(output)
    checkpoint.read("rows.weight", Slice(columns=(1024, 2048)))
    assert checkpoint.bytes_read == 199 * 8192 + 1024


def test_runs_far_apart_are_read_one_by_one_however_short() -> None:
    assert not ByteRuns(0, 100, 10, 100_000).is_read_whole
    assert ByteRuns(0, 100, 10, 1000).is_read_whole
    assert ByteRuns(0, 100, 10, 100_000).bytes_to_read == 1000


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("w.weight", "rows"),
        ("w.weight", "columns"),
        ("rows.weight", "columns"),
        ("fp4.weight", "rows"),
        ("fp4.weight", "columns"),
        ("experts.weight", "experts"),
        ("experts.weight", "rows"),
    ],
)
def test_the_parts_of_all_ranks_make_up_weight_and_scales(
    opened: PreparedCheckpoint, name: str, axis: str, world: int
) -> None:
    ranks = [opened.share(name, axis, rank, world) for rank in range(world)]  # type: ignore[arg-type]
    parts = [opened.read_weight(name, part) for part in ranks]
    whole = opened.read_weight(name)
    dimension = {"experts": 0, "rows": -2, "columns": -1}[axis]
    for field in ("weight", "scale", "kernel_scale"):
        pieces = [getattr(part, field).view(torch.uint8) for part in parts]
        assert torch.equal(torch.cat(pieces, dimension), getattr(whole, field).view(torch.uint8)), field


def test_ranks_are_balanced_and_cut_at_blocks(opened: PreparedCheckpoint) -> None:
    ranges = [opened.share("w.weight", "rows", rank, 3).rows for rank in range(3)]
    assert ranges == [(0, 320), (320, 672), (672, 1000)]
    assert opened.share("fp4.weight", "columns", 1, 3).columns == (16, 32)
    assert opened.share("bias", "rows", 7, 8).rows == (875, 1000)
    with pytest.raises(SliceError, match="rank 3 of 3"):
        opened.share("w.weight", "rows", 3, 3)
    with pytest.raises(SliceError, match="no experts"):
        opened.share("w.weight", "experts", 0, 3)


@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 9))
def test_shares_tile_an_axis_in_whole_units(size: int, unit: int, world: int) -> None:
    ranges = [share(size, unit, rank, world) for rank in range(world)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    for (_, end), (start, _) in pairwise(ranges):
        assert end == start
        assert end % unit == 0 or end == size
    lengths = [math.ceil((stop - start) / unit) for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


def test_a_stored_kernel_scale_is_the_scale_itself(opened: PreparedCheckpoint) -> None:
    parts = opened.read_weight("w.weight", Slice(rows=(32, 64)))
    assert parts.kernel_scale is not None
    assert parts.kernel_scale.dtype == torch.uint8
    assert parts.kernel_scale.data_ptr() == parts.scale.data_ptr()
    assert parts.scale.shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("w.weight", Slice(rows=(16, 64)), "rows 16 to 64 cut through blocks of 32"),
        ("w.weight", Slice(rows=(0, 999)), "multiples of 32, or at the edge"),
        ("w.weight", Slice(columns=(0, 199)), "columns 0 to 199"),
        ("fp4.weight", Slice(columns=(0, 8)), "blocks of 16 columns"),
    ],
)
def test_parts_that_cut_through_a_block_are_refused(
    opened: PreparedCheckpoint, name: str, part: Slice, words: str
) -> None:
    with pytest.raises(SliceError, match=words) as caught:
        opened.read_weight(name, part)
    assert name in str(caught.value)


def test_a_plain_tensor_has_no_scale(opened: PreparedCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="no quantized weight"):
        opened.read_weight("bias")


@pytest.mark.parametrize(
    ("shape", "grid", "part", "expected"),
    [
        ((64, 64), Grid((64, 64), ()), Slice(rows=(1, 2)), Slice()),
        ((64, 64), Grid((64, 64), (1,)), Slice(columns=(1, 2)), Slice()),
        ((64, 64), Grid((1, 64), (64, 1)), Slice(rows=(3, 5), columns=(1, 2)), Slice(rows=(3, 5))),
        ((64, 64), Grid((1, 64), (64,)), Slice(rows=(3, 5), columns=(1, 2)), Slice(rows=(3, 5))),
        ((8, 64, 64), Grid((64, 64), ()), Slice(experts=(2, 4)), Slice()),
        ((8, 64, 64), Grid((64, 64), (1, 1, 1)), Slice(experts=(2, 4)), Slice()),
        ((8, 64, 64), Grid((64, 64), (8, 1, 1)), Slice(experts=(2, 4), rows=(1, 9)), Slice(experts=(2, 4))),
        ((8, 64, 64), Grid((64, 64), (8,)), Slice(experts=(2, 4), rows=(1, 9)), Slice(rows=(2, 4))),
        ((130, 64), Grid((128, 128), (2, 1)), Slice(rows=(128, 130)), Slice(rows=(1, 2))),
        ((64, 64), Grid(None, (3, 3)), Slice(rows=(0, 64)), Slice()),
    ],
)
def test_scales_of_every_form_follow_their_weight(
    shape: tuple[int, ...], grid: Grid, part: Slice, expected: Slice
) -> None:
    assert in_step(part, shape, grid, "here") == expected
    bounds_of(expected, grid.shape, "the scale")


@pytest.mark.parametrize("grid", [Grid(None, (3, 3)), Grid((128, 128), (5,)), Grid(None, (2, 2, 2))])
def test_a_scale_of_unknown_blocks_cannot_be_cut(grid: Grid) -> None:
    with pytest.raises(SliceError, match="nothing states how many rows share a scale value"):
        in_step(Slice(rows=(0, 32)), (64, 64), grid, "here")


@pytest.mark.parametrize("grid", [Grid((32, 32), (2, 2)), Grid((64, 64), ()), Grid((1, 64), (64,))])
def test_a_part_beyond_its_weight_has_no_scale(grid: Grid) -> None:
    with pytest.raises(SliceError, match=r"rows 0 to 96 do not lie in the shape \[64, 64\]"):
        in_step(Slice(rows=(0, 96)), (64, 64), grid, "here")

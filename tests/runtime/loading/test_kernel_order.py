"""Loading outputs of `--layout kernel`: the same weights, in the kernels' order, whole and for ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepinfer_prep import Options, convert_checkpoint
from deepinfer_prep.errors import CheckpointError, ManifestError, RefusedError
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.container import read_header
from deepinfer_prep.manifest import read_manifest
from deepinfer_prep.runtime import gemm
from deepinfer_prep.runtime.attributes import KERNEL_ORDER, KERNEL_SCALE, KERNEL_WEIGHT, SCALE
from deepinfer_prep.runtime.load import Target, load_weights, weights_iterator
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.requests import Request
from deepinfer_prep.runtime.loading.slices import WHOLE, Slice, SliceError
from tests.banded import in_kernel_order, weights, write_checkpoint
from tests.runtime.fake_neuron import FakeNeuron
from tests.runtime.models import frozen

SHAPES = {
    "wide": ("e4m3", (544, 5120)),
    "tall": ("e4m3", (8192, 128)),
    "halves": ("e4m3", (4096, 128)),
    "w1": ("e4m3", (1024, 128)),
    "w3": ("e4m3", (1024, 128)),
    "odd1": ("e4m3", (1536, 128)),
    "odd3": ("e4m3", (1536, 128)),
    "experts": ("e4m3", (4, 544, 128)),
    "fp4": ("e2m1", (512, 1024)),
    "e0": ("e2m1", (288, 128)),
    "e1": ("e2m1", (288, 128)),
    "fp4_experts": ("e2m1", (2, 256, 128)),
}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.int8}
RANKS = 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("order") / "source", weights(SHAPES), shards=2)


@pytest.fixture(scope="module")
def stored(source: Path) -> Path:
    convert_checkpoint(source, source.parent / "stored")
    return source.parent / "stored"


@pytest.fixture(scope="module")
def laid_out(source: Path) -> Path:
    convert_checkpoint(source, source.parent / "laid_out", options=Options(layout="kernel"))
    return source.parent / "laid_out"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


def holder(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "meta") -> nn.Module:
    model = nn.Module()
    model.add_module(name, nn.Module())
    getattr(model, name).weight = frozen(torch.empty(shape, dtype=dtype, device=device))
    return model


def only(name: str) -> Callable[[str], str | None]:
    return lambda tensor: tensor if tensor == f"{name}.weight" else None


def load_one(folder: Path, name: str, part: Slice = WHOLE, device: str = "meta") -> torch.Tensor:
    """The parameter of a model that takes one weight or a part of it."""
    with PreparedCheckpoint(folder) as checkpoint:
        element = SHAPES[name][0]
        shape = tuple(checkpoint.read(f"{name}.weight", part).shape)
        model = holder(name, shape, DTYPES[element], device)
        load_weights(model, checkpoint, rename=only(name), slices=lambda _: part, progress=False)
    parameter = getattr(model, name).weight
    assert isinstance(parameter, nn.Parameter)
    return parameter


def activations(k: int) -> torch.Tensor:
    return torch.randn(3, k, generator=torch.Generator().manual_seed(1)).bfloat16()


def columns_of(name: str) -> int:
    element, shape = SHAPES[name]
    return shape[-1] * (2 if element == "e2m1" else 1)


def test_names_dtypes_and_shapes_are_those_of_the_source(stored: Path, laid_out: Path) -> None:
    with PreparedCheckpoint(stored) as before, PreparedCheckpoint(laid_out) as after:
        assert after.names == before.names
        for name in before.names:
            found, expected = after.tensor(name), before.tensor(name)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert torch.equal(raw(after.read(name)), raw(before.read(name)))
            if name in before.manifest.weights:
                one, other = after.read_weight(name), before.read_weight(name)
                assert torch.equal(raw(one.weight), raw(other.weight))
                assert torch.equal(raw(one.scale), raw(other.scale))


@given(data=st.data())
def test_any_part_is_read_row_major_under_the_weights_own_name(
    stored: Path, laid_out: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([name for name in SHAPES if name not in ("tall", "halves")]))
    shape = SHAPES[name][1]

    def some(size: int) -> tuple[int, int] | None:
        first = data.draw(st.integers(0, size))
        return data.draw(st.sampled_from([None, (first, data.draw(st.integers(first, size)))]))

    part = Slice(some(shape[0]) if len(shape) == 3 else None, some(shape[-2]), some(shape[-1]))
    with PreparedCheckpoint(stored) as before, PreparedCheckpoint(laid_out) as after:
        expected = before.read(f"{name}.weight", part)
        assert torch.equal(raw(after.read(f"{name}.weight", part)), raw(expected))
        room = torch.zeros(*expected.shape, 2, dtype=torch.uint8)[..., 1]
        after.read_all([Request(f"{name}.weight", part, room)])
        assert torch.equal(room, raw(expected))


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_stored_is_read_in_the_kernels_order(laid_out: Path, name: str) -> None:
    element, shape = SHAPES[name]
    with PreparedCheckpoint(laid_out) as checkpoint:
        columns = Slice(columns=(32, shape[-1] - 64))
        for part in (Slice(), columns):
            rows = raw(checkpoint.read(f"{name}.weight", part)).numpy()
            found = checkpoint.read(f"{name}.weight.nki", part)
            assert found.dtype == torch.uint8
            assert np.array_equal(found.numpy(), in_kernel_order(rows, element))
        with pytest.raises(SliceError, match="bands"):
            checkpoint.read(f"{name}.weight.nki", Slice(rows=(0, 96)))


@pytest.mark.parametrize("access", ["pread", "mmap"])
@pytest.mark.parametrize("name", ["wide", "fp4"])
def test_a_rank_of_columns_reads_its_part_alone(laid_out: Path, name: str, access: str) -> None:
    shape = SHAPES[name][1]
    with PreparedCheckpoint(laid_out, access=access) as checkpoint:
        for rank in range(RANKS):
            part = checkpoint.share(f"{name}.weight", "columns", rank, RANKS)
            model = holder(name, (shape[0], shape[1] // RANKS), DTYPES[SHAPES[name][0]])
            before = checkpoint.bytes_read
            load_weights(model, checkpoint, rename=only(name), slices=lambda _, part=part: part, progress=False)
            loaded = checkpoint.bytes_read - before
            checkpoint.read(f"{name}.weight.nki", part)
            weight = checkpoint.bytes_read - before - loaded
            assert weight == shape[0] * shape[1] // RANKS
            if name == "fp4":  # Its scale lies in the same bands.
                assert loaded == weight + shape[0] * shape[1] // 16 // RANKS
            else:
                assert loaded < 1.01 * weight
            assert hasattr(getattr(model, name).weight, KERNEL_ORDER)


def test_the_runs_of_columns_touch_few_more_pages_than_they_hold(laid_out: Path) -> None:
    with PreparedCheckpoint(laid_out) as checkpoint:
        tensor = checkpoint.tensor("wide.weight.nki")
        runs = [runs for runs, _ in tensor.layout.pieces(((0, 544), (640, 1280)), 8 << 20)]
        pages = sum(-(-(one.start + one.nbytes) // 4096) - one.start // 4096 for one in runs)
        assert sum(one.nbytes for one in runs) == 544 * 640
        assert pages * 4096 <= 1.05 * 544 * 640


@pytest.mark.parametrize("name", ["tall", "halves"])
def test_a_rank_of_whole_bands_reads_its_rows_alone(laid_out: Path, name: str) -> None:
    rows, row_bytes = SHAPES[name][1]
    with PreparedCheckpoint(laid_out, access="pread") as checkpoint:
        part = checkpoint.share(f"{name}.weight", "rows", 3, RANKS)
        model = holder(name, (rows // RANKS, row_bytes), torch.float8_e4m3fn)
        load_weights(model, checkpoint, rename=only(name), slices=lambda _: part, progress=False)
        scale = rows // RANKS // 32 * row_bytes // 32
        assert checkpoint.bytes_read == rows * row_bytes // RANKS + scale


PARTS = [
    ("wide", Slice()),
    ("wide", Slice(columns=(640, 1280))),
    ("wide", Slice(rows=(32, 320))),
    ("wide", Slice(rows=(512, 544), columns=(128, 384))),
    ("tall", Slice(rows=(1024, 2048))),
    ("halves", Slice(rows=(512, 1024))),
    ("experts", Slice()),
    ("experts", Slice(experts=(1, 3))),
    ("experts", Slice(experts=(1, 3), rows=(64, 192))),
    ("fp4", Slice()),
    ("fp4", Slice(columns=(64, 192))),
    ("fp4", Slice(rows=(32, 160))),
    ("fp4_experts", Slice(experts=(1, 2))),
]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_loaded_weight_multiplies_as_the_stored_one_bit_for_bit(
    stored: Path, laid_out: Path, name: str, part: Slice, device: str
) -> None:
    row_major, moved = load_one(stored, name, part), load_one(laid_out, name, part, device)
    element = SHAPES[name][0]
    order = getattr(moved, KERNEL_ORDER)
    assert order == BandedWeight(tuple(row_major.shape), element)
    assert moved.dtype == torch.uint8
    assert moved.shape == order.flat_shape
    weight = getattr(moved, KERNEL_WEIGHT)
    assert weight.data_ptr() == moved.data_ptr()
    assert np.array_equal(weight.numpy(), in_kernel_order(raw(row_major).numpy(), element))
    assert torch.equal(getattr(moved, KERNEL_SCALE), getattr(row_major, KERNEL_SCALE))
    assert torch.equal(raw(getattr(moved, SCALE)), raw(getattr(row_major, SCALE)))
    x = activations(row_major.shape[-1] * (2 if element == "e2m1" else 1))
    for group in range(row_major.shape[0]) if row_major.dim() == 3 else (None,):
        assert torch.equal(gemm.linear_qdq(x, moved, group), gemm.linear_qdq(x, row_major, group))


def test_memory_that_a_parameter_had_is_kept(laid_out: Path) -> None:
    with PreparedCheckpoint(laid_out) as checkpoint:
        for name in ("w1", "halves"):
            part = Slice(rows=(512, 1024)) if name == "halves" else Slice()
            shape = tuple(checkpoint.read(f"{name}.weight", part).shape)
            model = holder(name, shape, torch.float8_e4m3fn, "cpu")
            before = getattr(model, name).weight.data_ptr()
            load_weights(model, checkpoint, rename=only(name), slices=lambda _, part=part: part, progress=False)
            assert getattr(model, name).weight.data_ptr() == before


def test_a_part_that_no_kernel_takes_stays_row_major(stored: Path, laid_out: Path) -> None:
    part = Slice(columns=(0, 96))
    row_major, found = load_one(stored, "wide", part), load_one(laid_out, "wide", part)
    assert not hasattr(found, KERNEL_ORDER)
    assert found.dtype == torch.float8_e4m3fn
    assert torch.equal(raw(found), raw(row_major))
    x = activations(96)
    assert torch.equal(gemm.linear_qdq(x, found), gemm.linear_qdq(x, row_major))


@pytest.mark.parametrize("names", [("w1", "w3"), ("odd1", "odd3")])
def test_weights_one_below_the_other_are_one_weight(stored: Path, laid_out: Path, names: tuple[str, str]) -> None:
    rows = sum(SHAPES[name][1][0] for name in names)
    found = []
    for folder in (stored, laid_out):
        model = holder("w13", (rows, 128), torch.float8_e4m3fn)
        places = {f"{name}.weight": Target("w13.weight", part=part) for part, name in enumerate(names)}
        load_weights(model, folder, rename=places.get, progress=False)
        found.append(model.w13.weight)
    row_major, moved = found
    assert np.array_equal(getattr(moved, KERNEL_WEIGHT).numpy(), in_kernel_order(raw(row_major).numpy(), "e4m3"))
    assert torch.equal(gemm.linear_qdq(activations(128), moved), gemm.linear_qdq(activations(128), row_major))


def test_experts_are_stacked(stored: Path, laid_out: Path) -> None:
    found = []
    for folder in (stored, laid_out):
        model = holder("experts", (2, 288, 128), torch.int8)
        places = {f"e{number}.weight": Target("experts.weight", expert=number) for number in range(2)}
        load_weights(model, folder, rename=places.get, progress=False)
        found.append(model.experts.weight)
    row_major, moved = found
    assert getattr(moved, KERNEL_ORDER) == BandedWeight((2, 288, 128), "e2m1")
    for group in range(2):
        x = activations(256)
        assert torch.equal(gemm.linear_qdq(x, moved, group), gemm.linear_qdq(x, row_major, group))


def test_other_ways_to_multiply_give_the_same(stored: Path, laid_out: Path) -> None:
    row_major, moved = load_one(stored, "fp4_experts"), load_one(laid_out, "fp4_experts")
    x, flag = activations(256), torch.ones(1, 1, dtype=torch.int32)
    gated = gemm.linear_qdq_gated(x, moved, 1, flag)
    assert gated is not None
    assert torch.equal(gated, gemm.linear_qdq_gated(x, row_major, 1, flag))
    codes = x.to(torch.float8_e4m3fn)
    results = [torch.empty(3, 256, dtype=torch.bfloat16) for _ in range(2)]
    for weight, result in zip((row_major, moved), results, strict=True):
        gemm.gemm(codes, torch.full((3, 8), 127, dtype=torch.uint8), weight, result, 0)
    assert torch.equal(*results)


def test_a_copied_model_is_prepared_again(laid_out: Path) -> None:
    model = holder("w1", (1024, 128), torch.float8_e4m3fn)
    load_weights(model, laid_out, rename=only("w1"), progress=False)
    copied = copy.deepcopy(model)
    copied.w1.weight = frozen(model.w1.weight.clone())
    assert not gemm.has_kernel(copied.w1.weight)
    assert gemm.prepare_model(copied) == 1
    x = activations(128)
    assert torch.equal(gemm.linear_qdq(x, copied.w1.weight), gemm.linear_qdq(x, model.w1.weight))


def test_preparing_refuses_codes_above_240_in_the_kernels_order_too(laid_out: Path) -> None:
    model = holder("w1", (1024, 128), torch.float8_e4m3fn, "cpu")
    load_weights(model, laid_out, rename=only("w1"), progress=False)
    model.w1.weight[17] = 0x7E
    with pytest.raises(RefusedError, match="above 240"):
        gemm.prepare_model(model)


def test_loading_again_into_the_same_model_is_refused(laid_out: Path) -> None:
    model = holder("w1", (1024, 128), torch.float8_e4m3fn)
    load_weights(model, laid_out, rename=only("w1"), progress=False)
    with pytest.raises(RefusedError, match="build the model anew"):
        load_weights(model, laid_out, rename=only("w1"), progress=False)


def test_what_serving_engines_iterate_over_is_refused(laid_out: Path) -> None:
    with pytest.raises(RefusedError) as caught:
        next(iter(weights_iterator(laid_out)))
    assert "--layout stored" in str(caught.value)
    assert "load_weights" in str(caught.value)


def test_codes_are_checked_and_named_by_their_place_in_the_weight(laid_out: Path, tmp_path: Path) -> None:
    for path in laid_out.rglob("*"):
        if path.is_file():
            (tmp_path / path.relative_to(laid_out)).parent.mkdir(exist_ok=True)
            (tmp_path / path.relative_to(laid_out)).write_bytes(path.read_bytes())
    shard = tmp_path / read_manifest(tmp_path).shards[0]
    header = read_header(shard)
    tensor = next(one for one in header.tensors if one.name == "wide.weight.nki")
    with shard.open("r+b") as file:
        file.seek(header.data_start + tensor.start + 3 * 512 + 5)
        file.write(b"\x7a")
    with PreparedCheckpoint(tmp_path, verify="codes") as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.read("wide.weight", Slice(rows=(0, 32)))
    assert f"'wide.weight': element {5 * 5120 + 3:,} is the fp8 code 0x7a" in str(caught.value)


def test_a_manifest_that_says_another_shape_is_refused(laid_out: Path, tmp_path: Path) -> None:
    for path in laid_out.rglob("*"):
        if path.is_file():
            (tmp_path / path.relative_to(laid_out)).parent.mkdir(exist_ok=True)
            (tmp_path / path.relative_to(laid_out)).symlink_to(path)
    manifest = tmp_path / "neuron_manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text.replace("5120\n    ]\n   }", "2560\n    ]\n   }"))
    for path in tmp_path.rglob("*.safetensors"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    with pytest.raises(ManifestError, match="wide"):
        PreparedCheckpoint(tmp_path)


def test_a_graph_takes_a_weight_in_the_kernels_order(stored: Path, laid_out: Path) -> None:
    row_major, moved = load_one(stored, "fp4"), load_one(laid_out, "fp4")
    x = activations(2048)
    compiled = torch.compile(lambda x: gemm.linear_qdq(x, moved), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), gemm.linear_qdq(x, row_major))


@pytest.mark.parametrize("name", ["w1", "e0"])
def test_kernels_for_that_order_are_launched(stored: Path, laid_out: Path, name: str, fake_neuron: FakeNeuron) -> None:
    row_major, moved = load_one(stored, name), load_one(laid_out, name)
    x = activations(columns_of(name))
    found, expected = gemm.linear_qdq(x, moved), gemm.linear_qdq(x, row_major)
    launched = {"w1": "fp8_linear_kmajor_2core", "e0": "fp4_linear_kmajor"}[name]
    assert fake_neuron.calls == [launched, launched.replace("_kmajor", "")]
    assert ((found - expected).abs().float() <= 2**-6 * expected.abs().float() + 2**-6).all()

"""`--layout kernel` from the source to a verified output: what moves, what stays, and what is said of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer_prep.writing.segment_writer
from deepinfer_prep import Options, RefusedError, convert_checkpoint, inspect_checkpoint, verify_checkpoint
from deepinfer_prep.cli.main import main
from deepinfer_prep.errors import ManifestError
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.files.container import read_header
from deepinfer_prep.files.segments import new_buffer
from deepinfer_prep.files.storage import RangeReader
from deepinfer_prep.kernel_layout import weight_to_kernel_order, weight_to_stored_order
from deepinfer_prep.manifest import parse_manifest
from deepinfer_prep.planning.plan import OutputFile, plan_conversion
from deepinfer_prep.quantized import Element
from deepinfer_prep.writing.output_bytes import Tally, output_chunks
from tests.banded import in_kernel_order, weights, write_checkpoint
from tests.raises import raises_code
from tests.small_files import tree, write_file

KERNEL = Options(layout="kernel")
SHAPES = {
    "two_cores": ("e4m3", (1280, 128)),
    "edge": ("e4m3", (544, 256)),
    "small": ("e4m3", (32, 128)),
    "experts": ("e4m3", (3, 544, 128)),
    "fp4": ("e2m1", (544, 64)),
    "fp4_experts": ("e2m1", (2, 256, 192)),
    "odd_rows": ("e4m3", (48, 128)),
    "odd_columns": ("e4m3", (64, 96)),
}
MOVED = {name for name in SHAPES if not name.startswith("odd")}
MOVED_TENSORS = {f"{name}.weight": SHAPES[name][0] for name in MOVED} | {
    f"{name}.scale": "e8m0" for name in MOVED if SHAPES[name][0] == "e2m1"
}
"""What the bytes of each moved tensor stand for."""
MANIFEST = "neuron_manifest.json"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("kernel_order") / "source", weights(SHAPES, with_nan=True), shards=2
    )


@pytest.fixture(scope="module")
def stored(source: Path) -> Path:
    convert_checkpoint(source, source.parent / "stored")
    return source.parent / "stored"


@pytest.fixture(scope="module")
def laid_out(source: Path) -> Path:
    convert_checkpoint(source, source.parent / "laid_out", options=KERNEL)
    return source.parent / "laid_out"


def tensors_of(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """dtype, and bytes in the tensor's shape, of every tensor; all here are of one byte an element."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, content = read_header(path), np.fromfile(path, np.uint8)
        for tensor in header.tensors:
            data = content[header.data_start :][tensor.start : tensor.end]
            found[tensor.name] = (tensor.dtype, data.reshape(tensor.shape))
    return found


def test_gemm_weights_and_fp4_scales_are_moved_within_their_bands_and_everything_else_stays(
    stored: Path, laid_out: Path
) -> None:
    before, after = tensors_of(stored), tensors_of(laid_out)
    assert after.keys() == {name + ".nki" if name in MOVED_TENSORS else name for name in before}
    for name, (dtype, content) in before.items():
        if name in MOVED_TENSORS:
            assert after[name + ".nki"][0] == "U8"
            assert np.array_equal(after[name + ".nki"][1], in_kernel_order(content, MOVED_TENSORS[name])), name
        else:
            assert after[name][0] == dtype
            assert np.array_equal(after[name][1], content), name


def test_the_index_names_moved_weights_as_the_shards_do(source: Path, laid_out: Path) -> None:
    before, after = (json.loads((folder / INDEX).read_text()) for folder in (source, laid_out))
    renamed = {name: f"{name}.nki" for name in MOVED_TENSORS}
    assert after["weight_map"] == {renamed.get(name, name): file for name, file in before["weight_map"].items()}
    assert list(after["weight_map"]) == [renamed.get(name, name) for name in before["weight_map"]]
    assert after["metadata"] == before["metadata"]


def test_the_manifest_says_which_layout_and_what_the_tensors_were(laid_out: Path) -> None:
    manifest = json.loads((laid_out / MANIFEST).read_text())
    assert manifest["format_version"] == 3
    assert manifest["options"]["layout"] == "kernel"
    for name, (element, shape) in SHAPES.items():
        record = manifest["weights"][f"{name}.weight"]
        if name in MOVED:
            dtype = "F8_E4M3" if element == "e4m3" else "I8"
            layout = {"name": "k_major_bands", "version": 2, "dtype": dtype, "shape": list(shape)}
            assert record["layout"] == layout
        else:
            assert "layout" not in record
        if element == "e2m1":
            grid = [*shape[:-1], shape[-1] // 16]
            layout = {"name": "k_major_bands", "version": 2, "dtype": "F8_E8M0", "shape": grid}
            assert record["scale_layout"] == layout
        else:
            assert "scale_layout" not in record


def test_the_default_layout_is_what_it_was(stored: Path) -> None:
    manifest = json.loads((stored / MANIFEST).read_text())
    assert manifest["format_version"] == 2
    assert "layout" not in manifest["options"]
    assert not any({"layout", "scale_layout"} & record.keys() for record in manifest["weights"].values())


def test_tables_and_weights_whose_kernel_only_their_values_decide_stay(sample: Path, tmp_path: Path) -> None:
    plan = plan_conversion(open_checkpoint(sample), KERNEL)
    tables = [weight.quantized.weight for weight in plan.weights if weight.quantized.no_kernel_scale]
    assert tables
    assert not plan.laid_out.keys() & {*tables}
    per_row = weights({"mx": ("e4m3", (64, 128))})
    per_row["mx.scale"] = ("F8_E8M0", (64, 4), 120)
    assert plan_conversion(open_checkpoint(write_checkpoint(tmp_path, per_row)), KERNEL).laid_out == {}


@pytest.mark.parametrize("block", [(128, 128), (256, 384), (64, 64)])
def test_float_scales_are_for_the_kernel_of_128_by_128_blocks(tmp_path: Path, block: tuple[int, int]) -> None:
    grid = (256 // block[0], 384 // block[1])
    tensors = {
        "a.weight": ("F8_E4M3", (256, 384), 1),
        "a.weight_scale_inv": ("F32", grid, np.full(grid, 0.3, np.float32).tobytes()),
    }
    write_file(tmp_path / "model.safetensors", tensors)
    quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    laid_out = plan_conversion(open_checkpoint(tmp_path), KERNEL).laid_out
    assert laid_out.keys() == (set() if block == (64, 64) else {"a.weight"})


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(["e4m3", "e2m1"]), st.integers(0, 3), st.integers(1, 40), st.sampled_from([128, 256, 384])
        ),
        min_size=1,
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 600_000), max_size=5),
    chunk=st.sampled_from([64, 1000, 5000, 70_000, 3_000_000]),
)
def test_ranges_and_chunks_do_not_change_the_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[str, int, int, int]],
    cuts: list[int],
    chunk: int,
) -> None:
    wanted = {}
    for number, (element, experts, rows, columns) in enumerate(shapes):
        row_bytes = columns // 2 if element == "e2m1" else columns
        wanted[f"w{number}"] = (element, ((experts,) if experts else ()) + (32 * rows, row_bytes))
    folder = write_checkpoint(tmp_path_factory.mktemp("range"), weights(wanted, with_nan=True))
    plan = plan_conversion(open_checkpoint(folder), KERNEL)
    plain = plan_conversion(open_checkpoint(folder), Options())
    fp4_scales = sum(element == "e2m1" for element, _ in wanted.values())
    assert len(plan.laid_out_weights) == len(wanted)
    assert len(plan.laid_out) == len(wanted) + fp4_scales
    whole, whole_tally = computed(plain.files[0], [], 3_000_000)
    expected = bytearray(plan.files[0].header + whole[len(plain.files[0].header) :])
    for tensor in plain.files[0].tensors:
        if tensor.name in plan.laid_out:
            start = len(plan.files[0].header) + tensor.start
            stored_bytes = np.frombuffer(expected[start : start + tensor.nbytes], np.uint8).reshape(tensor.shape)
            moved = in_kernel_order(stored_bytes, plan.laid_out[tensor.name].content)
            expected[start : start + tensor.nbytes] = moved.tobytes()
    found, tally = computed(plan.files[0], cuts, chunk)
    assert found == bytes(expected)
    assert tally == whole_tally


def computed(file: OutputFile, cuts: list[int], chunk: int) -> tuple[bytes, Tally]:
    """The bytes of a planned file, computed in ranges that end at the cuts."""
    bounds = sorted({0, file.size, *(cut for cut in cuts if cut < file.size)})
    found, tally = bytearray(file.size), Tally()
    with RangeReader(file.source) as reader:
        for start, end in itertools.pairwise(bounds):
            for offset, data in output_chunks(file, reader, start, end, new_buffer(chunk), tally):
                found[offset : offset + data.size] = data.tobytes()
    return bytes(found), tally


@pytest.mark.parametrize(("workers", "chunk_size"), [(1, 64 * 1024), (5, 1024 * 1024)])
def test_workers_and_chunks_do_not_change_the_output(
    source: Path, laid_out: Path, tmp_path: Path, workers: int, chunk_size: int
) -> None:
    convert_checkpoint(source, tmp_path / "out", options=KERNEL, workers=workers, chunk_size=chunk_size)
    assert tree(tmp_path / "out") == tree(laid_out)


def test_an_interrupted_run_is_resumed_to_the_same_bytes(
    source: Path, laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise OSError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(deepinfer_prep.writing.segment_writer, "check_unchanged", stop)
        with pytest.raises(OSError, match="stopped"):
            convert_checkpoint(source, tmp_path / "out", options=KERNEL)
    with pytest.raises(RefusedError) as caught:
        convert_checkpoint(source, tmp_path / "out")
    assert "options" in str(caught.value)
    convert_checkpoint(source, tmp_path / "out", options=KERNEL)
    assert tree(tmp_path / "out") == tree(laid_out)


def test_either_layout_replaces_the_other(source: Path, stored: Path, laid_out: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out")
    with pytest.raises(RefusedError):
        convert_checkpoint(source, tmp_path / "out", options=KERNEL)
    convert_checkpoint(source, tmp_path / "out", options=KERNEL, overwrite=True)
    assert tree(tmp_path / "out") == tree(laid_out)
    convert_checkpoint(source, tmp_path / "out", overwrite=True)
    assert tree(tmp_path / "out") == tree(stored)


def test_verify_finds_no_difference(source: Path, laid_out: Path) -> None:
    assert verify_checkpoint(laid_out).ok
    found = verify_checkpoint(laid_out, source=source)
    assert found.ok
    assert found.options == {"layout": "kernel"}
    assert found.quantized_weights == len(SHAPES)


@pytest.mark.parametrize("name", sorted(MOVED))
def test_verify_names_the_weight_and_the_element_that_was_changed(
    source: Path, laid_out: Path, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "out"
    convert_checkpoint(source, copy, options=KERNEL)
    element, shape = SHAPES[name]
    marked = np.zeros(shape, np.uint8)
    row = (*(size - 1 for size in shape[:-1]), shape[-1] // 3)
    marked[row] = 1
    for path in copy.glob("*.safetensors"):
        header = read_header(path)
        for tensor in header.tensors:
            if tensor.name == f"{name}.weight.nki":
                with path.open("r+b") as file:
                    moved = int(np.flatnonzero(in_kernel_order(marked, "e4m3"))[0])
                    file.seek(header.data_start + tensor.start + moved)
                    byte = file.read(1)[0]
                    file.seek(-1, 1)
                    file.write(bytes([0x7A if byte != 0x7A else 0x7B]))
    with_source = verify_checkpoint(copy, source=source)
    assert not with_source.ok
    at = int(np.flatnonzero(marked)[0])
    found = {(one.tensor, one.element) for one in with_source.first if one.tensor}
    assert found == {(f"{name}.weight", at)}
    alone = [one for one in verify_checkpoint(copy).first if one.tensor]
    assert [(one.tensor, one.element) for one in alone] == ([(f"{name}.weight", at)] if element == "e4m3" else [])


def test_a_weight_under_its_own_name_is_a_difference(laid_out: Path, tmp_path: Path) -> None:
    manifest = parse_manifest((laid_out / MANIFEST).read_bytes(), tmp_path)
    for name, data in tree(laid_out).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    shard = tmp_path / manifest.shards[0]
    shard.write_bytes(shard.read_bytes().replace(b'"two_cores.weight.nki":', b'"two_cores.weight":    '))
    problems = [str(one) for one in verify_checkpoint(tmp_path).first]
    assert any("no file holds it" in problem and "two_cores.weight.nki" in problem for problem in problems)
    assert any("under its own name" in problem for problem in problems)


def test_a_name_that_the_layout_needs_is_refused(tmp_path: Path) -> None:
    tensors = weights({"a": ("e4m3", (64, 128))})
    tensors["a.weight.nki"] = ("U8", (4,), 0)
    folder = write_checkpoint(tmp_path / "source", tensors)
    with raises_code("tensor-name-taken") as caught:
        convert_checkpoint(folder, tmp_path / "out", options=KERNEL)
    assert "'a.weight.nki'" in str(caught.value)
    assert inspect_checkpoint(folder).refusals == ()


def test_inspect_says_what_would_be_moved(source: Path) -> None:
    found = inspect_checkpoint(source, options=KERNEL)
    assert {*found.laid_out} == {f"{name}.weight" for name in MOVED}
    actions = {(row.kind, row.action): row.tensors for row in found.kinds}
    assert actions["fp8 weight", "halved, in the kernels' order"] == 4
    assert actions["fp8 weight", "halved"] == 2
    assert actions["fp4 weight", "copied, in the kernels' order"] == 2
    assert inspect_checkpoint(source).laid_out == ()


def test_the_commands_take_the_option_and_say_what_they_did(source: Path, tmp_path: Path) -> None:
    arguments = [str(source), str(tmp_path / "out"), "--layout", "kernel"]
    dry = CliRunner().invoke(main, ["convert", *arguments, "--dry-run", "--json"])
    assert dry.exit_code == 0
    assert len(json.loads(dry.stdout)["laid_out"]) == len(MOVED)
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(main, ["convert", *arguments, "--report", str(tmp_path / "report.json"), "--quiet"])
    assert done.exit_code == 0
    assert f"{len(MOVED)} weights in the kernels' order" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["laid_out"] == len(MOVED)
    shown = CliRunner().invoke(main, ["report", str(tmp_path / "out"), "--json", "--quiet"])
    assert shown.exit_code == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 1, "version 1, but this version of deepinfer-prep reads"),
        ("name", "other", "the layout 'other' version 2"),
        ("shape", [0, 128], "two or three sizes"),
        ("shape", [128], "two or three sizes"),
        ("dtype", "BF16", "F8_E4M3 or I8 or U8"),
    ],
)
def test_a_manifest_of_another_layout_is_refused(laid_out: Path, field: str, value: object, message: str) -> None:
    manifest = json.loads((laid_out / MANIFEST).read_text())
    manifest["weights"]["small.weight"]["layout"][field] = value
    with pytest.raises(ManifestError) as caught:
        parse_manifest(json.dumps(manifest).encode(), laid_out / MANIFEST)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_layout": {"dtype": "F32"}}, "F8_E8M0 or U8 at weights, scale_layout"),
        ({"scale_layout": {"shape": [512, 8]}}, "a scale of the rows of a weight in this layout"),
        ({"layout": None}, "the fields name, version, dtype, shape"),
    ],
)
def test_a_layout_of_a_scale_that_does_not_fit_is_refused(
    laid_out: Path, change: dict[str, dict[str, object] | None], message: str
) -> None:
    manifest = json.loads((laid_out / MANIFEST).read_text())
    record = manifest["weights"]["fp4.weight"]
    for field, values in change.items():
        record[field] = None if values is None else record[field] | values
    with pytest.raises(ManifestError) as caught:
        parse_manifest(json.dumps(manifest).encode(), laid_out / MANIFEST)
    assert message in str(caught.value)


@given(rows=st.integers(1, 1400), row_bytes=st.integers(1, 40), element=st.sampled_from(["e4m3", "e2m1"]))
def test_every_byte_of_a_weight_of_any_shape_goes_to_its_place_and_back(
    rows: int, row_bytes: int, element: Element
) -> None:
    stored_bytes = np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    moved = weight_to_kernel_order(stored_bytes, element)
    assert np.array_equal(moved, in_kernel_order(stored_bytes, element))
    assert np.array_equal(weight_to_stored_order(moved, element), stored_bytes)


@given(
    matrices=st.integers(1, 3), rows=st.integers(1, 1400), row_bytes=st.integers(1, 40), at=st.floats(0, 1, width=16)
)
def test_a_place_in_that_order_is_traced_to_its_row_and_column(
    matrices: int, rows: int, row_bytes: int, at: float
) -> None:
    weight = BandedWeight((matrices, rows, row_bytes), "e4m3")
    offset = min(weight.nbytes - 1, int(at * weight.nbytes))
    marked = np.zeros(weight.shape, np.uint8)
    marked.reshape(-1)[weight.stored_offset(offset)] = 1
    assert int(np.flatnonzero(in_kernel_order(marked, "e4m3"))[0]) == offset
    start, band = weight.band_at(offset)
    assert start <= offset < start + band.rows * row_bytes
    assert start // weight.matrix_bytes == (start + band.rows * row_bytes - 1) // weight.matrix_bytes


@given(matrices=st.integers(1, 3), rows=st.integers(1, 1400), most=st.integers(0, 4000), data=st.data())
def test_bands_that_are_read_together_follow_each_other_and_stay_within_their_limits(
    matrices: int, rows: int, most: int, data: st.DataObject
) -> None:
    weight = BandedWeight((matrices, rows, 2), "e4m3")
    start = data.draw(st.integers(0, weight.nbytes - 1))
    end = data.draw(st.integers(start + 1, weight.nbytes))
    found = list(weight.bands_between(start, end, most))
    first, band = weight.band_at(start)
    assert bool(found) == (first == start and start + 2 * band.rows <= end)
    position = start
    for offset, one in found:
        assert offset == position
        assert weight.band_at(position) == (offset, one)
        position += 2 * one.rows
    assert position <= end
    assert position - start <= most or len(found) <= 1
    if found and position < end:
        following = 2 * weight.band_at(position)[1].rows
        assert position + following > end or position + following - start > most

"""Converting: what an output holds, and what happens to runs that do not get to their end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import deepinfer_prep.writing.segment_writer
from deepinfer_prep import Options, Progress, RefusedError, convert_checkpoint, verify_checkpoint
from deepinfer_prep._version import __version__
from deepinfer_prep.writing.output_bytes import output_chunks
from tests.independent_reader import assert_equal_but_for_rounded_codes, dequantize_all, load_checkpoint
from tests.raises import raises_code
from tests.small_files import SCALE, WEIGHT, Tensor, tree, write_config, write_file, write_index

MANIFEST = "neuron_manifest.json"


@pytest.fixture(scope="module")
def prepared(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("convert") / "prepared"
    convert_checkpoint(sample, output)
    return output


def test_an_independent_reader_gets_the_same_numbers(sample: Path, prepared: Path) -> None:
    source, output = load_checkpoint(sample), load_checkpoint(prepared)
    before, after = dequantize_all(source, "scale"), dequantize_all(output, "scale")
    moved = assert_equal_but_for_rounded_codes(before, after, source)
    assert moved > 0, "the sample is meant to hold codes that halving rounds"
    largest = max(int((weight.view(torch.uint8) & 0x7F).max()) for weight in output.values() if weight.dtype == FP8)
    assert largest == 0x76


FP8 = torch.float8_e4m3fn


def test_every_other_tensor_is_byte_identical(sample: Path, prepared: Path) -> None:
    source, output = load_checkpoint(sample), load_checkpoint(prepared)
    scales = {name.removesuffix("weight") + "scale" for name, tensor in source.items() if tensor.dtype == FP8}
    for name, tensor in source.items():
        assert output[name].dtype == tensor.dtype
        assert output[name].shape == tensor.shape
        if tensor.dtype != FP8 and name not in scales:
            assert torch.equal(output[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert any(tensor.dtype == torch.int8 for tensor in source.values())


def test_all_other_files_are_copied_and_the_index_is_unchanged(sample: Path, prepared: Path) -> None:
    source, output = tree(sample), tree(prepared)
    shards = {name for name in source if name.endswith(".safetensors")}
    assert {name: output[name] for name in source.keys() - shards} == {
        name: data for name, data in source.items() if name not in shards
    }
    assert "model.safetensors.index.json" in output
    assert any("/" in name for name in source), "the sample is meant to have folders"
    added = output.keys() - source.keys()
    assert added == {MANIFEST, "neuron/neuron-00001-of-00001.safetensors", "neuron/neuron.safetensors.index.json"}


def test_shards_say_who_wrote_them(prepared: Path) -> None:
    for path in prepared.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            assert shard.metadata() == {"format": "pt", "deepinfer_prep": __version__, "fp8_max": "224"}


def test_the_sidecar_holds_halves_of_every_mixing_matrix(sample: Path, prepared: Path) -> None:
    source, sidecar = load_checkpoint(sample), load_file(prepared / "neuron/neuron-00001-of-00001.safetensors")
    names = [name for name in source if name.endswith(("hc_attn_fn", "hc_ffn_fn"))]
    assert sorted(sidecar) == sorted(f"{name}.{half}" for name in names for half in ("hi", "lo"))
    for name in names:
        hi = source[name].to(torch.bfloat16)
        assert torch.equal(sidecar[f"{name}.hi"], hi)
        assert torch.equal(sidecar[f"{name}.lo"], (source[name] - hi.float()).to(torch.bfloat16))
    index = json.loads((prepared / "neuron/neuron.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(sorted(sidecar), "neuron-00001-of-00001.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in sidecar.values())


def test_the_manifest_records_every_quantized_weight(sample: Path, prepared: Path) -> None:
    source, manifest = load_checkpoint(sample), json.loads((prepared / MANIFEST).read_text())
    quantized = {name for name, tensor in source.items() if tensor.dtype in (FP8, torch.int8)}
    assert manifest["weights"].keys() == quantized
    for name, record in manifest["weights"].items():
        assert record["scale"] == name.removesuffix("weight") + "scale"
        if "engram.embed" in name:
            assert (record["kernel_scale"], record["block"]) == (None, [1, 32])
            assert "look-up table" in record["reason"]
        elif source[name].dtype == FP8:
            assert (record["kernel_scale"], record["block"], record["element"]) == (record["scale"], [32, 32], "e4m3")
        else:
            assert (record["kernel_scale"], record["block"], record["element"]) == (record["scale"], [1, 32], "e2m1")


def float_scaled(folder: Path, scale: torch.Tensor, rows: int, columns: int, block: list[int]) -> Path:
    """One compressed-tensors weight with block scales in fp32."""
    write_file(
        folder / "model.safetensors",
        {
            "l.weight": ("F8_E4M3", (rows, columns), 0x7E),
            "l.weight_scale": ("F32", tuple(scale.shape), scale.numpy().tobytes()),
        },
    )
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": block}
    write_config(folder, quant_method="compressed-tensors", config_groups={"group_0": {"weights": weights}})
    return folder


def test_power_of_two_blocks_of_128_give_the_kernel_scale(tmp_path: Path) -> None:
    exponents = torch.randint(-100, 100, (3, 2))
    float_scaled(tmp_path / "source", torch.ldexp(torch.ones(3, 2), exponents), 300, 250, [128, 128])
    convert_checkpoint(tmp_path / "source", tmp_path / "out", options=Options(implausible_scales="accept"))
    sidecar = load_file(tmp_path / "out" / "neuron/neuron-00001-of-00001.safetensors")
    found = sidecar["l.weight.nki_scale"]
    expected = (exponents + 127 + 1).repeat_interleave(4, 0).repeat_interleave(4, 1)[:10, :8]
    assert torch.equal(found, expected.to(torch.uint8))
    assert verify_checkpoint(tmp_path / "out", source=tmp_path / "source").ok


@pytest.mark.parametrize("value", [0.0, -2.0, 3.0, 2.0**-140])
def test_other_float_scales_give_no_kernel_scale_and_the_reason(tmp_path: Path, value: float) -> None:
    scale = torch.ones(3, 2)
    scale[1, 1] = value
    float_scaled(tmp_path / "source", scale, 300, 250, [128, 128])
    result = convert_checkpoint(tmp_path / "source", tmp_path / "out", options=Options(implausible_scales="accept"))
    assert result.kernel_scales == {"not every scale is a positive power of two": 1}
    assert not list((tmp_path / "out").glob("neuron-*.safetensors"))


def test_one_file_converts_on_its_own(tmp_path: Path) -> None:
    path = write_file(tmp_path / "one" / "part.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    result = convert_checkpoint(path, tmp_path / "out")
    assert set(tree(tmp_path / "out")) == {MANIFEST, "part.safetensors"}
    assert result.counts.above_240 == 64 * 64
    with safe_open(tmp_path / "out" / "part.safetensors", "pt") as shard:
        assert torch.all(shard.get_tensor("l.weight").float() == 224)
        assert torch.all(shard.get_tensor("l.scale").float() == 2)


def test_progress_counts_every_byte_once(sample: Path, tmp_path: Path) -> None:
    events: list[Progress] = []
    convert_checkpoint(sample, tmp_path / "out", progress=events.append, chunk_size=70_000)
    converted = [event for event in events if event.stage == "convert"]
    assert converted[0].done == 0
    assert [event.done for event in converted] == sorted(event.done for event in converted)
    assert converted[-1].done == converted[-1].total


def test_workers_and_chunks_do_not_change_the_output(sample: Path, prepared: Path, tmp_path: Path) -> None:
    convert_checkpoint(sample, tmp_path / "out", workers=5, chunk_size=65_536)
    assert tree(tmp_path / "out") == tree(prepared)


def two_weights(folder: Path, **changes: Tensor) -> Path:
    """Two shards; the scale of one weight lies in the other shard."""
    tensors = {"a.weight": WEIGHT, "a.scale": SCALE, "b.weight": WEIGHT, "b.scale": SCALE, **changes}
    shards = {"a.weight": "1.safetensors", "b.scale": "1.safetensors"}
    shards |= dict.fromkeys(tensors.keys() - shards.keys(), "2.safetensors")
    for shard in ("1.safetensors", "2.safetensors"):
        write_file(folder / shard, {name: tensors[name] for name in tensors if shards[name] == shard})
    write_index(folder, shards)
    return folder


def test_nan_codes_are_kept_counted_and_named(tmp_path: Path) -> None:
    codes = bytes([0x7F, 0xFF] + [0x7E] * 4094)
    source = two_weights(tmp_path / "source", **{"b.weight": ("F8_E4M3", (64, 64), codes)})
    result = convert_checkpoint(source, tmp_path / "out")
    assert result.counts.nan == 2
    assert result.nan_tensors == {"b.weight": 2}
    assert any("2 NaN codes" in warning and "'b.weight'" in warning for warning in result.warnings)
    with safe_open(tmp_path / "out" / "2.safetensors", "pt") as shard:
        assert shard.get_tensor("b.weight").view(torch.uint8).flatten()[:3].tolist() == [0x7F, 0xFF, 0x76]
    assert verify_checkpoint(tmp_path / "out", source=source).nan_codes == 2


def test_strict_refuses_nan_codes_before_writing(tmp_path: Path) -> None:
    source = two_weights(tmp_path / "source", **{"b.weight": ("F8_E4M3", (64, 64), 0xFF)})
    with pytest.raises(RefusedError, match=r"4,096 NaN codes in 1 fp8 weights: 'b.weight'"):
        convert_checkpoint(source, tmp_path / "out", options=Options(strict=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("byte", [254, 255])
def test_a_scale_without_a_double_is_refused_before_writing(tmp_path: Path, byte: int) -> None:
    source = two_weights(tmp_path / "source", **{"b.scale": ("F8_E8M0", (2, 2), bytes([127, 1, byte, 2]))})
    with pytest.raises(RefusedError, match=rf"1\.safetensors: tensor 'b\.scale': element 2 is the e8m0 byte {byte}"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mixing_matrix_that_is_not_finite_is_refused_before_writing(tmp_path: Path) -> None:
    matrix = torch.ones(24, 8)
    matrix[3, 5] = math.inf
    source = two_weights(tmp_path / "source", **{"layers.0.hc_attn_fn": ("F32", (24, 8), matrix.numpy().tobytes())})
    with pytest.raises(RefusedError, match=r"tensor 'layers\.0\.hc_attn_fn': element 29 is inf"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_scales_are_all_named_and_nothing_is_written(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"e.weight": WEIGHT, "h.weight": WEIGHT, "e.qscale": SCALE}
    source = two_weights(tmp_path / "source", **tensors)
    with pytest.raises(RefusedError) as caught:
        convert_checkpoint(source, tmp_path / "out")
    message = str(caught.value)
    assert "'e.weight'" in message
    assert "'h.weight'" in message
    assert "e.qscale" in message
    assert not (tmp_path / "out").exists()


def test_an_output_is_no_input(prepared: Path, tmp_path: Path) -> None:
    with raises_code("already-converted"):
        convert_checkpoint(prepared, tmp_path / "again")


@pytest.mark.parametrize("place", ["same", "inside", "around", "link"])
def test_source_and_output_must_be_separate(tmp_path: Path, place: str) -> None:
    source = two_weights(tmp_path / "outer" / "source")
    (tmp_path / "link").symlink_to(source)
    output = {"same": source, "inside": source / "out", "around": source.parent, "link": tmp_path / "link"}[place]
    before = tree(tmp_path)
    with raises_code("same-folder"):
        convert_checkpoint(source, output, overwrite=True)
    assert tree(tmp_path) == before


class Stopped(BaseException):
    """Stands for a kill: nothing in the code expects it."""


def stop_after(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Let the run die when it asks for one chunk more."""
    left = [chunks]

    def counted(*arguments: object) -> object:
        for item in output_chunks(*arguments):  # type: ignore[arg-type]
            if not left[0]:
                raise Stopped
            left[0] -= 1
            yield item

    monkeypatch.setattr(deepinfer_prep.writing.segment_writer, "output_chunks", counted)
    monkeypatch.setattr(deepinfer_prep.writing.segment_writer, "COMMIT_BYTES", 1)


@pytest.mark.parametrize("chunks", [0, 1, 7, 20, 25])
def test_an_interrupted_run_shows_nothing_and_resumes(
    sample: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, chunks)
        with pytest.raises(Stopped):
            convert_checkpoint(sample, output, workers=2, chunk_size=65_536)
    assert [entry.name for entry in output.iterdir()] == [".deepinfer-prep"]
    with raises_code("no-output"):
        verify_checkpoint(output)
    result = convert_checkpoint(sample, output)
    assert tree(output) == tree(prepared)
    assert (result.resumed_bytes > 0) == (chunks > 7)


def test_a_damaged_segment_of_an_interrupted_run_is_written_again(
    sample: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 25)
        with pytest.raises(Stopped):
            convert_checkpoint(sample, output, workers=1, chunk_size=65_536)
    for path in (output / ".deepinfer-prep" / "files").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    convert_checkpoint(sample, output)
    assert tree(output) == tree(prepared)


@pytest.mark.parametrize("change", ["options", "tool", "source"])
def test_a_journal_of_another_run_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    source, output = two_weights(tmp_path / "source"), tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stopped):
            convert_checkpoint(source, output)
    options = Options(strict=change == "options")
    if change == "tool":
        monkeypatch.setattr("deepinfer_prep.convert.__version__", "0.0.0")
    if change == "source":
        two_weights(source, **{"a.weight": ("F8_E4M3", (64, 64), 0x30)})
    expected = {"options": "options", "tool": "tool", "source": "files"}[change]
    with pytest.raises(RefusedError, match=rf"cannot be resumed: its {expected} differ"):
        convert_checkpoint(source, output, options=options)
    monkeypatch.undo()
    convert_checkpoint(source, output, options=options, overwrite=True)
    assert verify_checkpoint(output, source=source).ok


def test_a_finished_output_is_replaced_only_when_asked(tmp_path: Path) -> None:
    first, second = two_weights(tmp_path / "1"), tmp_path / "2"
    write_file(second / "model.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    output = tmp_path / "out"
    convert_checkpoint(first, output)
    with raises_code("finished-output"):
        convert_checkpoint(second, output)
    convert_checkpoint(second, output, overwrite=True)
    assert set(tree(output)) == {MANIFEST, "model.safetensors"}
    assert verify_checkpoint(output, source=second).ok


@pytest.mark.parametrize("stale", ["neuron-00001-of-00001.safetensors", "neuron/neuron-00001-of-00001.safetensors"])
def test_the_sidecar_of_a_replaced_output_goes_from_wherever_it_lay(stale: str, tmp_path: Path) -> None:
    source, output = two_weights(tmp_path / "source"), tmp_path / "out"
    write_file(output / stale, {"old": WEIGHT})
    write_index(output / Path(stale).parent, {"old": Path(stale).name})
    convert_checkpoint(source, output, overwrite=True)
    assert set(tree(output)) == {MANIFEST, *(path.name for path in source.iterdir())}


def test_a_foreign_folder_is_not_written_to(tmp_path: Path) -> None:
    source, output = two_weights(tmp_path / "source"), tmp_path / "out"
    write_file(output / "model-00009-of-00009.safetensors", {"old": WEIGHT})
    (output / "notes.txt").write_text("keep")
    with raises_code("not-empty"):
        convert_checkpoint(source, output)
    convert_checkpoint(source, output, overwrite=True)
    assert not (output / "model-00009-of-00009.safetensors").exists()
    assert (output / "notes.txt").read_text() == "keep"
    assert verify_checkpoint(output).ok


def test_too_little_space_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = two_weights(tmp_path / "source")

    class Full:
        f_bavail = 1
        f_frsize = 4096

    monkeypatch.setattr("deepinfer_prep.writing.output_checks.os.statvfs", lambda path: Full)
    with pytest.raises(RefusedError, match=r"needs \d+,\d+ bytes.* has 4,096 bytes free"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Folders that hold less, more or something else than one checkpoint: what counts, what goes along, what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deepinfer_prep import convert_checkpoint
from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.files.checkpoint import open_checkpoint
from tests.small_files import ONE_F32, SCALE, WEIGHT, Tensor, write_file, write_index

F32: Tensor = ("F32", (), ONE_F32)
BF16: Tensor = ("BF16", (4, 4), 1)


def refuse(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def write_shards(folder: Path, names: list[str]) -> dict[str, str]:
    """One weight with its scale in each file; returns tensor -> file."""
    weight_map = {}
    for number, name in enumerate(names):
        tensors: dict[str, Tensor] = {f"{name}{number}.weight": WEIGHT, f"{name}{number}.scale": SCALE}
        write_file(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    return weight_map


INCOMPLETE = {
    "one in the middle": (["model-00001-of-00003", "model-00003-of-00003"], "model-00002-of-00003"),
    "the last": (["model-00001-of-00002"], "model-00002-of-00002"),
    "the first": (["model-00002-of-00002"], "model-00001-of-00002"),
    "without zeros": (["model-1-of-12", "model-11-of-12"], "model-2-of-12"),
    "counted from zero": (["model-00000-of-00003", "model-00001-of-00003"], "model-00002-of-00003"),
    "an underscore": (["weights_01-of-02"], "weights_02-of-02"),
    "with an end": (["model-00001-of-00002-fp8"], "model-00002-of-00002-fp8"),
    "of a component": (["diffusion_pytorch_model-00001-of-00002"], "diffusion_pytorch_model-00002-of-00002"),
    "beside a complete numbering": (
        ["consolidated-1-of-1", "model-00001-of-00002", "mtp-00001-of-00001"],
        "model-00002-of-00002",
    ),
    "beside a file without a number": (["model", "model-mtp-00002-of-00002"], "model-mtp-00001-of-00002"),
}


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("case", INCOMPLETE)
def test_names_that_count_say_what_is_missing(tmp_path: Path, case: str, has_index: bool) -> None:
    names, missing = INCOMPLETE[case]
    weight_map = write_shards(tmp_path, [f"{name}.safetensors" for name in names])
    if has_index:
        write_index(tmp_path, weight_map)
    assert f"{missing}.safetensors" in refuse(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00002", "model-00002-of-00002"],
        ["model-00000-of-00002", "model-00001-of-00002"],
        ["model-1-of-2", "model-2-of-2", "mtp-1-of-1"],
        ["model0-mp1"],
        ["model-rank-0-part-0"],
        ["out-of-order"],
    ],
)
def test_complete_numberings_and_names_that_do_not_count_pass(tmp_path: Path, names: list[str]) -> None:
    write_shards(tmp_path, [f"{name}.safetensors" for name in names])
    assert len(open_checkpoint(tmp_path).shards) == len(names)


def test_unfinished_downloads_are_named_with_what_is_missing(tmp_path: Path) -> None:
    write_shards(tmp_path, ["model-00001-of-00002.safetensors"])
    download = tmp_path / ".cache" / "huggingface" / "download"
    download.mkdir(parents=True)
    (download / "abc=.0123.incomplete").write_bytes(b"x")
    message = refuse(tmp_path)
    assert ".cache/huggingface/download/abc=.0123.incomplete" in message
    assert "1 are missing, model-00002-of-00002.safetensors" in message


def test_safetensors_without_fp8_go_along_wherever_they_lie(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    write_index(source, write_shards(source, ["a.safetensors"]))
    beside = ["2_Dense/model.safetensors", "speech-lora/adapter_model.safetensors", "act_scales.safetensors"]
    for name in beside:
        (source / name).parent.mkdir(exist_ok=True)
        write_file(source / name, {"x": BF16, "y": ("F8_E5M2", (2,), 1)})
    result = convert_checkpoint(source, output)
    for name in beside:
        assert (output / name).read_bytes() == (source / name).read_bytes()
    assert not any("is not copied" in warning for warning in result.warnings)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E4M3FNUZ"])
def test_fp8_beside_the_shards_stays_behind_with_its_reason(tmp_path: Path, dtype: str) -> None:
    write_index(tmp_path, write_shards(tmp_path, ["a.safetensors"]))
    (tmp_path / "draft").mkdir()
    write_file(tmp_path / "draft" / "model.safetensors", {"x.weight": (dtype, (4, 4), 1)})
    checkpoint = open_checkpoint(tmp_path)
    assert not any(other.name.startswith("draft") for other in checkpoint.others)
    (warning,) = checkpoint.warnings
    assert warning.startswith("draft/model.safetensors is not copied: it lies in a folder below the checkpoint's")


def test_a_damaged_file_beside_the_shards_stays_behind_with_its_reason(tmp_path: Path) -> None:
    write_index(tmp_path, write_shards(tmp_path, ["a.safetensors"]))
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    (warning,) = open_checkpoint(tmp_path).warnings
    assert warning.startswith("b.safetensors is not copied: it is no shard of the checkpoint, and cannot be read (")


def test_scales_repeated_beside_a_model_without_an_index_are_no_second_model(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE, "l.input_scale": F32})
    write_file(tmp_path / "act_scales.safetensors", {"l.input_scale": F32, "m.input_scale": F32})
    checkpoint = open_checkpoint(tmp_path)
    assert [shard.name for shard in checkpoint.shards] == ["model.safetensors"]
    assert [other.name for other in checkpoint.others] == ["act_scales.safetensors"]


@pytest.mark.parametrize("folder", ["", "original/"])
def test_an_index_goes_along_only_with_its_shards(tmp_path: Path, folder: str) -> None:
    write_index(tmp_path, write_shards(tmp_path, ["a.safetensors"]))
    (tmp_path / folder).mkdir(exist_ok=True)
    second = tmp_path / f"{folder}consolidated.safetensors.index.json"
    second.write_text(json.dumps({"weight_map": {"x.weight": "consolidated.safetensors"}}))
    write_file(tmp_path / f"{folder}consolidated.safetensors", {"x.weight": WEIGHT})
    checkpoint = open_checkpoint(tmp_path)
    assert f"{folder}consolidated.safetensors.index.json" not in {other.name for other in checkpoint.others}
    assert any("consolidated.safetensors, which it names, is not copied either" in text for text in checkpoint.warnings)
    write_file(tmp_path / f"{folder}consolidated.safetensors", {"x.weight": BF16})
    checkpoint = open_checkpoint(tmp_path)
    assert f"{folder}consolidated.safetensors.index.json" in {other.name for other in checkpoint.others}
    assert checkpoint.warnings == ()


@pytest.mark.parametrize("stated", [0, "0"])
def test_a_total_size_of_nothing_is_no_warning(tmp_path: Path, stated: object) -> None:
    weight_map = write_shards(tmp_path, ["a.safetensors"])
    text = json.dumps({"metadata": {"total_size": stated}, "weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert open_checkpoint(tmp_path).warnings == ()


def test_the_folder_of_a_pipeline_names_its_parts(tmp_path: Path) -> None:
    for part in ("transformer", "text_encoder", "vae"):
        (tmp_path / part).mkdir()
        write_file(tmp_path / part / "model.safetensors", {"x": BF16})
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    message = refuse(tmp_path)
    assert "folders below it do: text_encoder, transformer, vae." in message
    assert f"deepinfer-prep convert {tmp_path / 'text_encoder'} OUT" in message


@pytest.mark.parametrize("above", ["", "models--org--name"])
def test_the_folders_of_the_hubs_cache_lead_to_the_snapshot(tmp_path: Path, above: str) -> None:
    entry = tmp_path / "models--org--name"
    (entry / "blobs").mkdir(parents=True)
    (entry / "snapshots" / "abc").mkdir(parents=True)
    write_file(entry / "blobs" / "0123", {"x": BF16})
    os.symlink("../../blobs/0123", entry / "snapshots" / "abc" / "model.safetensors")
    message = refuse(tmp_path / above)
    assert "snapshots/abc" in message
    open_checkpoint(entry / "snapshots" / "abc")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("model0-mp2.safetensors", "model1-mp2.safetensors"),
        ("tp0_sharded_checkpoint.safetensors", "tp1_sharded_checkpoint.safetensors"),
        ("model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"),
    ],
)
def test_the_files_of_ranks_are_told_to_convert_alone(tmp_path: Path, first: str, second: str) -> None:
    for name in (first, second):
        write_file(tmp_path / name, {"l.weight": WEIGHT, "l.scale": SCALE})
    message = refuse(tmp_path)
    assert "single ranks of a distributed checkpoint" in message
    convert_checkpoint(tmp_path / first, tmp_path / "output")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("org/model", "hf download org/model"),
        ("s3://bucket/model", "is an address"),
        ("hf://org/model", "is an address"),
        ("/nowhere/at/all", "does not exist. Give the folder"),
    ],
)
def test_what_is_no_path_is_told_what_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refuse(Path(source))

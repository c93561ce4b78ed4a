"""Faults that people met with values, indexes and shards: each gets the behaviour that helps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from deepinfer_prep import (
    RefusedError,
    convert_checkpoint,
    inspect_checkpoint,
    verify_checkpoint,
)
from deepinfer_prep.cli.main import main
from tests.families.raw import read_file
from tests.families.running import converted, one_file, refusal
from tests.small_files import ONE_F32, SCALE, WEIGHT, Tensor, tree, write_file, write_index


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("element", [0, 2047, 4095])
def test_nan_codes_are_kept_counted_and_named(source: Path, output: Path, code: int, element: int) -> None:
    """17: with --strict they stop the run."""
    codes = np.full(4096, 0x30, np.uint8)
    codes[element] = code
    one_file(
        source,
        {"k.weight": WEIGHT, "k.scale": SCALE, "l.weight": ("F8_E4M3", (64, 64), codes.tobytes()), "l.scale": SCALE},
    )
    assert "1 NaN codes in 1 fp8 weights: 'l.weight' (1)" in refusal(source, output, strict=True)
    result = convert_checkpoint(source, output)
    assert dict(result.nan_tensors) == {"l.weight": 1}
    assert any("1 NaN codes were kept, in 1 tensors: 'l.weight' (1)" in warning for warning in result.warnings)
    assert read_file(output / "model.safetensors")["l.weight"].codes.ravel()[element] == code
    assert verify_checkpoint(output, source=source).ok


@pytest.mark.parametrize("name", ["layers.0.hc_attn_fn", "mtp.0.hc_ffn_fn", "hc_head_fn", "model.layers.0.attn_hc.fn"])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_mixing_matrix_that_lost_its_precision_is_reported(source: Path, output: Path, dtype: str, name: str) -> None:
    """19"""
    one_file(source, {name: (dtype, (24, 64), 1), "l.weight": WEIGHT, "l.scale": SCALE})
    result = convert_checkpoint(source, output)
    assert result.split == 0
    (warning,) = [warning for warning in result.warnings if name in warning]
    assert f"expected F32, found {dtype}: precision is already lost" in warning


def test_a_mixing_matrix_of_three_dimensions_is_not_passed_over_in_silence(source: Path) -> None:
    one_file(source, {"layers.hc_attn_fn": ("F32", (2, 24, 64), 1)})
    found = inspect_checkpoint(source)
    assert found.split == ()
    assert any("layers.hc_attn_fn [2, 24, 64]" in warning for warning in found.warnings)


CANDIDATES: dict[str, Tensor] = {
    "hc_head_fn": ("F32", (4, 64), 1),
    "layers.0.attn_hc.fn": ("F32", (24, 64), 1),
    "layers.0.hc_attn_base": ("F32", (24,), 1),
    "layers.0.gate.weight": ("F32", (24, 64), 1),
}


def test_mixing_matrices_under_other_names_are_reported(source: Path, output: Path) -> None:
    """20"""
    one_file(source, CANDIDATES)
    result = convert_checkpoint(source, output)
    (warning,) = [warning for warning in result.warnings if "were not split" in warning]
    assert warning.startswith(
        "2 fp32 matrices look like hyper-connection matrices but were not split: hc_head_fn [4, 64], "
    )
    assert "layers.0.attn_hc.fn [24, 64]" in warning
    assert "--split PATTERN" in warning


Prepare = Callable[[Path], None]


def missing_shard(folder: Path) -> None:
    write_file(folder / "a.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    write_index(folder, {"l.weight": "a.safetensors", "l.scale": "a.safetensors", "m.weight": "b.safetensors"})


def entry_without_tensor(folder: Path) -> None:
    write_file(folder / "a.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    write_index(folder, dict.fromkeys(["l.weight", "l.scale", "gone.weight"], "a.safetensors"))


def entry_of_another_shard(folder: Path) -> None:
    write_file(folder / "a.safetensors", {"l.weight": WEIGHT})
    write_file(folder / "b.safetensors", {"l.scale": SCALE})
    write_index(folder, {"l.weight": "b.safetensors", "l.scale": "a.safetensors"})


def tensor_without_entry(folder: Path) -> None:
    write_file(folder / "a.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE, "extra.weight": WEIGHT})
    write_index(folder, dict.fromkeys(["l.weight", "l.scale"], "a.safetensors"))


def twice_without_index(folder: Path) -> None:
    write_file(folder / "a.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    write_file(folder / "b.safetensors", {"l.weight": WEIGHT})


def truncated(folder: Path) -> None:
    one_file(folder, {"l.weight": WEIGHT, "l.scale": SCALE})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def trailing(folder: Path) -> None:
    one_file(folder, {"l.weight": WEIGHT, "l.scale": SCALE})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(7))


def pointer(folder: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n"
    (folder / "model.safetensors").write_bytes(text)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (missing_shard, "b.safetensors (1 tensor); 1 of 2 shards present"),
        (entry_without_tensor, "'gone.weight' (a.safetensors)"),
        (entry_of_another_shard, "2 tensors that the named shards do not hold"),
        (tensor_without_entry, "'extra.weight' (a.safetensors)"),
        (twice_without_index, "tensor 'l.weight' is in two files"),
        (truncated, "7 bytes missing"),
        (trailing, "7 bytes too many"),
        (pointer, "is a Git LFS pointer"),
    ],
)
def test_an_index_and_shards_that_disagree_stop_the_planning(
    source: Path, output: Path, prepare: Prepare, message: str
) -> None:
    """21, 22, 23, 24, 26, 27, 28"""
    prepare(source)
    assert message in refusal(source, output)


def test_a_shard_that_the_index_does_not_name_is_left_out_and_told(source: Path, output: Path) -> None:
    """24"""
    write_file(source / "a.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    write_file(source / "b.safetensors", {"l.weight": WEIGHT})
    write_index(source, dict.fromkeys(["l.weight", "l.scale"], "a.safetensors"))
    result = convert_checkpoint(source, output)
    assert any(
        warning.startswith("b.safetensors is not copied: the index does not name it") for warning in result.warnings
    )
    assert not (output / "b.safetensors").exists()


def test_a_stale_output_is_refused_and_replaced_only_when_asked(source: Path, output: Path) -> None:
    """25: the final folder holds no foreign shard."""
    one_file(source, {"l.weight": WEIGHT, "l.scale": SCALE})
    write_file(output / "model-00009-of-00009.safetensors", {"old": WEIGHT})
    before = tree(output)
    with pytest.raises(RefusedError, match=r"model-00009-of-00009\.safetensors"):
        convert_checkpoint(source, output)
    assert tree(output) == before
    convert_checkpoint(source, output, overwrite=True)
    assert sorted(path.name for path in output.glob("*.safetensors")) == ["model.safetensors"]


@pytest.mark.parametrize("scale", [("F8_E8M0", (0, 2), b""), ("F32", (), ONE_F32), ("F32", (0, 1), b"")])
def test_empty_tensors_and_scalars_pass(source: Path, output: Path, scale: Tensor) -> None:
    """32"""
    last = "scale" if scale[0] == "F8_E8M0" else "weight_scale"
    one_file(source, {"a.weight": ("F8_E4M3", (0, 64), b""), f"a.{last}": scale, "s": ("F32", (), ONE_F32)})
    result = convert_checkpoint(source, output, workers=1)
    assert result.tensors == 3
    assert verify_checkpoint(output, source=source).ok


@pytest.mark.parametrize("shape", [(0, 0), (64, 0), (0,), (2, 0, 64)])
def test_empty_weights_of_any_shape_pass(source: Path, output: Path, shape: tuple[int, ...]) -> None:
    one_file(source, {"a.weight": ("F8_E4M3", shape, b""), "a.weight_scale": ("F32", (), ONE_F32)})
    assert converted(source, output)["a.weight_scale"].values == 2


def test_an_output_is_refused_as_a_source(source: Path, output: Path, tmp_path: Path) -> None:
    """37: by the mark in its headers, and by its manifest where the shards were rewritten."""
    one_file(source, {"l.weight": WEIGHT, "l.scale": SCALE}, {"format": "pt", "deepinfer_prep": "1"})
    assert "was already converted by deepinfer-prep 1" in refusal(source, output)
    one_file(source, {"l.weight": WEIGHT, "l.scale": SCALE})
    convert_checkpoint(source, output)
    again = tmp_path / "again"
    assert "was already converted" in refusal(output, again)
    shutil.copy(source / "model.safetensors", output / "model.safetensors")
    assert "is already an output of deepinfer-prep" in refusal(output, again)


def test_a_source_without_high_codes_looks_already_converted(source: Path, output: Path) -> None:
    """37: without the mark."""
    one_file(source, {"l.weight": ("F8_E4M3", (64, 64), 0x76), "l.scale": SCALE})
    result = convert_checkpoint(source, output)
    assert any("looks as if it had been converted already" in warning for warning in result.warnings)


@pytest.mark.parametrize("missing", [0, 25, 49])
def test_the_one_missing_scale_of_many_is_found_from_headers(source: Path, output: Path, missing: int) -> None:
    """42: zero bytes are written, and the name is there."""
    weights: dict[str, Tensor] = {f"l{i}.weight": WEIGHT for i in range(50)}
    scales: dict[str, Tensor] = {f"l{i}.scale": SCALE for i in range(50) if i != missing}
    write_file(source / "a.safetensors", weights | scales)
    assert f"F8_E4M3 tensors that have no scale (1): 'l{missing}.weight' in a.safetensors." in refusal(source, output)
    assert inspect_checkpoint(source).refusals


def test_refusals_are_in_the_json_of_inspect(source: Path) -> None:
    one_file(source, {f"l{i}.weight": WEIGHT for i in range(60)})
    result = CliRunner().invoke(main, ["inspect", str(source), "--json", "--quiet"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert len(found["unscaled"]) == 60, "every name, also those that the sentence leaves out"
    assert "and 50 more (`inspect --json` lists all)" in found["refusals"][0]

"""Outputs that nobody could read afterwards: refused before, or laid out so that they can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_prep import convert_checkpoint, inspect_checkpoint, verify_checkpoint
from deepinfer_prep.errors import ContainerError
from deepinfer_prep.files.container import MAX_HEADER_BYTES, parse_header, read_header
from deepinfer_prep.writing import sidecar
from tests.hostile.checkpoints import MANIFEST
from tests.raises import raises_code
from tests.small_files import SCALE, WEIGHT, write_file, write_index
from tests.writing.test_sidecar import float_scaled


@pytest.mark.parametrize("name", [MANIFEST, "config.json", "model.bin"])
def test_an_index_may_not_name_what_is_no_shard(tmp_path: Path, name: str) -> None:
    write_file(tmp_path / name, {"a.weight": WEIGHT, "a.scale": SCALE})
    write_index(tmp_path, {"a.weight": name, "a.scale": name})
    with raises_code("name-outside"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("spare", [0, 8])
def test_a_header_that_our_marks_make_too_long_is_refused(
    tmp_path: Path, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "source" / "model.safetensors", {"a.weight": WEIGHT, "a.scale": SCALE})
    length = read_header(path).data_start - 8
    monkeypatch.setattr("deepinfer_prep.planning.plan.MAX_HEADER_BYTES", length + spare)
    assert inspect_checkpoint(tmp_path / "source").refusal_codes == ("header-too-large",)
    with raises_code("header-too-large"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sidecar_whose_header_would_be_too_long_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sidecar.MAX_SIDECAR_HEADER_BYTES < MAX_HEADER_BYTES
    monkeypatch.setattr(sidecar, "MAX_SIDECAR_HEADER_BYTES", 400)
    source, output = float_scaled(tmp_path / "source", 6), tmp_path / "out"
    convert_checkpoint(source, output)
    paths = sorted((output / "neuron").glob("*.safetensors"))
    assert len(paths) > 3
    assert all(read_header(path).data_start < 800 for path in paths)
    assert verify_checkpoint(output, source=source).ok


@pytest.mark.parametrize("dimensions", [65, 1_000_000])
def test_a_shape_that_no_framework_has_is_refused(dimensions: int) -> None:
    header = {"a": {"dtype": "U8", "shape": [1] * dimensions, "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    with pytest.raises(ContainerError, match="dimensions"):
        parse_header(text, 8 + len(text) + 1, "x.safetensors")


def test_a_shape_that_frameworks_have_is_read() -> None:
    text = json.dumps({"a": {"dtype": "U8", "shape": [1] * 64, "data_offsets": [0, 1]}}).encode()
    assert len(parse_header(text, 8 + len(text) + 1, "x").tensors[0].shape) == 64

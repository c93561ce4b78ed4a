"""Verification finds every kind of damage, says where it is, and finds nothing where nothing is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepinfer_prep import PrepError, VerificationResult, convert_checkpoint, verify_checkpoint
from deepinfer_prep.errors import ManifestError
from deepinfer_prep.files.container import TensorInfo, read_header
from deepinfer_prep.files.digests import SegmentDigests
from deepinfer_prep.runtime import PreparedCheckpoint
from tests.raises import raises_code

MANIFEST = "neuron_manifest.json"
WEIGHT = "layers.0.attn.wq_a.weight"
SCALE = "layers.0.attn.wq_a.scale"
MATRIX = "layers.0.hc_attn_fn"


@pytest.fixture(scope="module")
def prepared(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("verify") / "prepared"
    convert_checkpoint(sample, output)
    return output


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def find(folder: Path, name: str) -> tuple[Path, int, TensorInfo]:
    """The file of a tensor, the offset of its bytes in it, and its entry."""
    for path in sorted(folder.rglob("*.safetensors")):
        header = read_header(path)
        for tensor in header.tensors:
            if tensor.name == name:
                return path, header.data_start + tensor.start, tensor
    raise KeyError(name)


def poke(folder: Path, name: str, element: int, value: bytes) -> None:
    """Overwrite one element of a tensor."""
    path, offset, tensor = find(folder, name)
    assert (element + 1) * len(value) <= tensor.nbytes
    with path.open("r+b") as file:
        file.seek(offset + element * len(value))
        file.write(value)


def edit_manifest(folder: Path, change: Callable[[dict], None]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def refresh_digests(folder: Path) -> None:
    """Make the manifest agree with the files, as damage before the digests were taken would."""

    def change(manifest: dict) -> None:
        for name, record in manifest["files"].items():
            digests = SegmentDigests()
            data = (folder / name).read_bytes()
            digests.update(np.frombuffer(data, dtype=np.uint8))
            record["size"], record["digests"] = len(data), list(digests.digests())

    edit_manifest(folder, change)


def findings(result: VerificationResult) -> str:
    return "\n".join(map(str, result.first))


def test_a_correct_output_has_no_difference(sample: Path, prepared: Path) -> None:
    alone, with_source = verify_checkpoint(prepared), verify_checkpoint(prepared, source=sample)
    assert alone.ok
    assert with_source.ok
    assert (
        alone.bytes_read
        == sum(path.stat().st_size for path in prepared.rglob("*") if path.is_file())
        - (prepared / MANIFEST).stat().st_size
    )
    assert with_source.quantized_weights > 100
    assert with_source.sidecar_tensors > 10


@pytest.mark.parametrize("chunk_size", [65_536, 1_000_003])
def test_one_changed_weight_byte_is_found_at_its_element(sample: Path, copy: Path, chunk_size: int) -> None:
    poke(copy, WEIGHT, 1321, b"\x2a")
    result = verify_checkpoint(copy, source=sample, chunk_size=chunk_size)
    assert result.differences == 2
    assert f"tensor {WEIGHT!r}: element 1,321: expected byte 0x" in findings(result)
    assert "found 0x2a" in findings(result)
    alone = verify_checkpoint(copy)
    assert alone.differences == 1
    assert "digest of bytes 0 to" in findings(alone)


def test_all_differing_bytes_are_counted(sample: Path, copy: Path) -> None:
    path, offset, tensor = find(copy, WEIGHT)
    data = bytearray(path.read_bytes())
    for position in range(offset, offset + tensor.nbytes):
        data[position] ^= 0x01
    path.write_bytes(data)
    assert verify_checkpoint(copy, source=sample).differences == tensor.nbytes + 1


@pytest.mark.parametrize("code", [0x78, 0x7B, 0x7E, 0xF8, 0xFE])
def test_a_code_that_the_hardware_misreads_is_found_without_the_source(copy: Path, code: int) -> None:
    poke(copy, WEIGHT, 17, bytes([code]))
    refresh_digests(copy)
    result = verify_checkpoint(copy)
    assert result.differences == 1
    assert f"tensor {WEIGHT!r}: element 17: the code 0x{code:02x} lies above 240" in findings(result)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_that_the_source_did_not_have_is_found(copy: Path, code: int) -> None:
    poke(copy, WEIGHT, 17, bytes([code]))
    refresh_digests(copy)
    result = verify_checkpoint(copy)
    assert f"tensor {WEIGHT!r}: expected 0 NaN codes, found 1" in findings(result)


def test_codes_of_other_tensors_may_be_anything(copy: Path) -> None:
    poke(copy, "layers.0.ffn.experts.0.w1.weight", 5, b"\x7e")
    refresh_digests(copy)
    assert verify_checkpoint(copy).ok


def test_a_scale_that_is_not_finite_is_found(copy: Path) -> None:
    poke(copy, SCALE, 1, b"\xff")
    refresh_digests(copy)
    assert f"tensor {SCALE!r}: element 1: the scale is not finite" in findings(verify_checkpoint(copy))


@pytest.mark.parametrize("half", ["hi", "lo"])
def test_a_wrong_half_is_found(copy: Path, half: str) -> None:
    poke(copy, f"{MATRIX}.{half}", 40, b"\x12\x34")
    refresh_digests(copy)
    result = verify_checkpoint(copy)
    assert result.differences == 1
    assert f"tensor '{MATRIX}.{half}': element 40: is not what the main shards give" in findings(result)


def test_a_changed_matrix_makes_its_halves_wrong(copy: Path) -> None:
    poke(copy, MATRIX, 7, b"\x01\x02\x03\x3f")
    refresh_digests(copy)
    assert f"tensor '{MATRIX}.hi': element 7" in findings(verify_checkpoint(copy))


def test_a_missing_file_is_found(sample: Path, copy: Path) -> None:
    path, _, _ = find(copy, WEIGHT)
    path.unlink()
    result = verify_checkpoint(copy, source=sample)
    assert not result.ok
    assert f"{path.name}: the manifest names this file, but it is missing" in findings(result)


@pytest.mark.parametrize("change", [-7, 7])
def test_a_wrong_size_is_found(copy: Path, change: int) -> None:
    path, _, _ = find(copy, WEIGHT)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size + change)
    result = verify_checkpoint(copy)
    assert f"{path.name}: expected {size:,} bytes, found {size + change:,}" in findings(result)


def test_a_changed_copied_file_is_found(sample: Path, copy: Path) -> None:
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text().replace("{", "[", 1))
    assert "tokenizer.json: byte 0: expected byte 0x7b" in findings(verify_checkpoint(copy, source=sample))
    assert "tokenizer.json: the digest" in findings(verify_checkpoint(copy))


def test_a_foreign_shard_is_found(copy: Path) -> None:
    shutil.copy(find(copy, WEIGHT)[0], copy / "model-00009-of-00009.safetensors")
    assert "model-00009-of-00009.safetensors: the manifest does not name" in findings(verify_checkpoint(copy))


def test_an_index_that_lies_is_found(copy: Path) -> None:
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][WEIGHT]
    path.write_text(json.dumps(index))
    refresh_digests(copy)
    assert f"does not name 1 tensor that the shards hold: {WEIGHT!r}" in findings(verify_checkpoint(copy))


def test_records_that_the_source_does_not_give_are_found(sample: Path, copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["weights"][WEIGHT].update(block=[64, 64]))
    result = verify_checkpoint(copy, source=sample)
    assert f"tensor {WEIGHT!r}: the record of this weight is not what the source gives" in findings(result)
    assert f"tensor {WEIGHT!r}: its stored scale is not of the kernels' form" in findings(verify_checkpoint(copy))


def test_a_weight_that_the_manifest_forgets_is_found_with_the_source(sample: Path, copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["weights"].pop(WEIGHT))
    assert not verify_checkpoint(copy, source=sample).ok


def test_another_source_is_found(copy: Path, sample: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(sample, tmp_path / "other"))
    path, offset, _ = find(other, SCALE)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    result = verify_checkpoint(copy, source=other)
    assert result.differences == 1
    assert f"tensor {SCALE!r}: element 0: expected byte" in findings(result)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 2}'])
def test_a_damaged_manifest_is_an_error(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_text(text)
    with pytest.raises(ManifestError, match="is damaged"):
        verify_checkpoint(copy)


def test_a_newer_format_is_an_error(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest.update(format_version=99))
    with pytest.raises(PrepError, match="has format version 99, but this version of deepinfer-prep reads 2"):
        verify_checkpoint(copy)


def test_an_output_of_the_form_before_is_refused_with_the_remedy(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest.update(format_version=1))
    for read in (verify_checkpoint, PreparedCheckpoint):
        with pytest.raises(ManifestError, match=r"beside the shards.*Convert the original checkpoint again"):
            read(copy)


@pytest.mark.parametrize("name", ["neuron/more.safetensors", "neuron/more.safetensors.index.json"])
def test_a_foreign_file_beside_the_sidecar_is_found(copy: Path, name: str) -> None:
    (copy / name).write_bytes(b"{}")
    assert f"{name}: the manifest does not name this file" in findings(verify_checkpoint(copy))


def test_a_folder_without_a_manifest_is_no_output(tmp_path: Path) -> None:
    with raises_code("no-output"):
        verify_checkpoint(tmp_path)

"""What `verify --source` finds where the output and the source do not belong together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep import VerificationResult, convert_checkpoint, verify_checkpoint
from deepinfer_prep.files.container import read_header
from tests.raises import raises_code
from tests.small_files import write_file
from tests.writing.test_sidecar import float_scaled

MANIFEST = "neuron_manifest.json"
SIDECAR = "neuron/neuron-00001-of-00001.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = float_scaled(tmp_path / "source")
    (folder / "notes.txt").write_text("notes")
    return folder


@pytest.fixture
def output(source: Path, tmp_path: Path) -> Path:
    convert_checkpoint(source, tmp_path / "out")
    return tmp_path / "out"


def change_manifest(output: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((output / MANIFEST).read_text())
    change(data)
    (output / MANIFEST).write_text(json.dumps(data))


def found(result: VerificationResult) -> list[str]:
    return [str(difference) for difference in result.first]


def test_a_source_of_the_same_sizes_and_other_names_is_another_checkpoint(source: Path, output: Path) -> None:
    other = Path(shutil.copytree(source, source.with_name("other")))
    (other / "notes.txt").rename(other / "nodes.txt")
    assert f"{MANIFEST}: the output was converted from another checkpoint than {other}" in found(
        verify_checkpoint(output, source=other)
    )


def test_a_file_that_only_the_source_has_is_found(source: Path, output: Path) -> None:
    (source / "more.txt").write_text("more")
    assert "more.txt: the source gives 4 bytes, the manifest says no such file" in found(
        verify_checkpoint(output, source=source)
    )


def test_a_file_that_only_the_output_has_is_found(source: Path, output: Path) -> None:
    (source / "notes.txt").unlink()
    assert "notes.txt: the source gives no such file, the manifest says 5 bytes" in found(
        verify_checkpoint(output, source=source)
    )


def rewrite(path: Path, change: Callable[[dict[str, tuple[str, tuple[int, ...], bytes]]], Any]) -> None:
    """Write a safetensors file again with other tensors, marked as written by this tool."""
    header, data = read_header(path), path.read_bytes()
    tensors = {
        tensor.name: (
            tensor.dtype,
            tensor.shape,
            data[header.data_start + tensor.start : header.data_start + tensor.end],
        )
        for tensor in header.tensors
    }
    change(tensors)
    write_file(path, dict(tensors), dict(header.metadata))


def test_a_half_of_another_dtype_is_found(output: Path) -> None:
    for suffix in ("hi", "lo"):
        name = f"z0.hc_attn_fn.{suffix}"
        path = output / SIDECAR
        before = path.read_bytes()
        rewrite(path, lambda tensors, name=name: tensors.update({name: ("F16", (3, 5), bytes(30))}))
        assert any(
            name in line and "expected dtype BF16, found F16" in line for line in found(verify_checkpoint(output))
        )
        path.write_bytes(before)


def test_a_kernel_scale_of_another_shape_is_found(output: Path) -> None:
    rewrite(
        output / SIDECAR,
        lambda tensors: tensors.update({"a0.weight.nki_scale": ("U8", (9, 1), bytes([126] * 9))}),
    )
    lines = found(verify_checkpoint(output))
    assert any("expected U8 [3, 3], found U8 [9, 1]" in line for line in lines)


def test_a_sidecar_tensor_that_nothing_accounts_for_is_found(output: Path) -> None:
    rewrite(output / SIDECAR, lambda tensors: tensors.update({"more": ("U8", (1,), b"x")}))
    assert any(
        "the manifest does not account for this sidecar tensor" in line for line in found(verify_checkpoint(output))
    )


def test_a_kernel_scale_that_the_stored_scale_does_not_give_is_found(output: Path) -> None:
    change_manifest(output, lambda data: data["weights"]["a0.weight"].update(block=[16, 20]))
    assert any("no kernel scale can be derived" in line for line in found(verify_checkpoint(output)))


def test_a_stored_scale_that_the_kernels_do_not_take_is_found(output: Path) -> None:
    change_manifest(output, lambda data: data["weights"]["a0.weight"].update(kernel_scale="a0.weight_scale"))
    assert any("its stored scale is not of the kernels' form" in line for line in found(verify_checkpoint(output)))


def test_a_shard_that_this_tool_did_not_write_is_found(output: Path) -> None:
    path = output / "model.safetensors"
    rewrite(path, lambda tensors: None)
    with_marks = path.read_bytes()
    path.write_bytes(with_marks.replace(b"deepinfer_prep", b"another_tool__"))
    assert any(
        "model.safetensors: the header's metadata has no 'deepinfer_prep'" in line
        for line in found(verify_checkpoint(output))
    )


def test_a_damaged_header_is_a_finding_and_no_error(output: Path) -> None:
    path = output / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8] = 0
    path.write_bytes(data)
    assert any("header that is not valid JSON" in line for line in found(verify_checkpoint(output)))


def test_the_first_differences_are_described_and_all_are_counted(output: Path) -> None:
    for number in range(130):
        (output / f"more-{number:03}.safetensors").write_bytes(b"")
    result = verify_checkpoint(output)
    assert result.differences == 130
    assert len(result.first) == 100
    assert result.first[0].file == "more-000.safetensors"


def test_options_of_another_version_are_told(source: Path, output: Path) -> None:
    change_manifest(output, lambda data: data["options"].update(colour="red"))
    with raises_code("other-version"):
        verify_checkpoint(output, source=source)


def test_a_code_above_240_in_the_first_byte_of_a_shard_is_found(output: Path) -> None:
    path = output / "model.safetensors"
    start = read_header(path).data_start
    assert read_header(path).tensors[0].name == "a0.weight"
    data = bytearray(path.read_bytes())
    data[start] = 0x7E
    path.write_bytes(data)
    lines = found(verify_checkpoint(output))
    assert any("tensor 'a0.weight': element 0: the code 0x7e lies above 240" in line for line in lines)

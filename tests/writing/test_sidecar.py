"""How the sidecar's tensors are laid out in files, and that each file holds what its header says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from deepinfer_prep import convert_checkpoint, inspect_checkpoint, verify_checkpoint
from deepinfer_prep.files.container import Location, TensorInfo, read_header
from deepinfer_prep.writing import sidecar
from tests.small_files import Tensor, write_config, write_file


def float_scaled(folder: Path, matrices: int = 1) -> Path:
    """Weights of 96x96 with one power of two for each 32x32 block, so kernel scales of nine bytes, and matrices."""
    tensors: dict[str, Tensor] = {}
    for number in range(matrices):
        tensors[f"a{number}.weight"] = ("F8_E4M3", (96, 96), 0x7E)
        tensors[f"a{number}.weight_scale"] = ("F32", (3, 3), np.full(9, 0.25, np.float32).tobytes())
        matrix = np.random.default_rng(number).normal(size=(3, 5)).astype(np.float32)
        tensors[f"z{number}.hc_attn_fn"] = ("F32", (3, 5), matrix.tobytes())
    write_file(folder / "model.safetensors", tensors)
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [32, 32]}
    write_config(folder, quant_method="compressed-tensors", config_groups={"group_0": {"weights": weights}})
    return folder


def test_halves_lie_at_even_offsets_beside_scales_of_an_odd_size(tmp_path: Path) -> None:
    source, output = float_scaled(tmp_path / "source", 3), tmp_path / "out"
    convert_checkpoint(source, output)
    (path,) = (output / "neuron").glob("*.safetensors")
    header = read_header(path)
    halves = [tensor for tensor in header.tensors if tensor.dtype == "BF16"]
    assert len(halves) == 6
    assert [tensor.nbytes for tensor in header.tensors if tensor.dtype == "U8"] == [9, 9, 9]
    assert all((header.data_start + tensor.start) % 2 == 0 for tensor in halves)
    with safe_open(source / "model.safetensors", "pt") as stored, safe_open(path, "pt") as found:
        for number in range(3):
            matrix = stored.get_tensor(f"z{number}.hc_attn_fn")
            hi = matrix.to(torch.bfloat16)
            assert torch.equal(found.get_tensor(f"z{number}.hc_attn_fn.hi"), hi)
            lo = (matrix - hi.float()).to(torch.bfloat16)
            assert torch.equal(found.get_tensor(f"z{number}.hc_attn_fn.lo"), lo)
            assert found.get_tensor(f"a{number}.weight.nki_scale").tolist() == [[126] * 3] * 3
    assert verify_checkpoint(output, source=source).ok


def test_the_size_that_is_announced_is_that_of_the_sidecars_tensors(tmp_path: Path) -> None:
    source = float_scaled(tmp_path / "source", 2)
    assert inspect_checkpoint(source).sidecar_bytes == 2 * (2 * 2 * 15 + 9)


def matrix(name: str, elements: int) -> tuple[sidecar.SidecarTensor, sidecar.SidecarTensor]:
    info = TensorInfo(name, "F32", (elements,), 0, 4 * elements)
    return sidecar.halves(name, Location(Path("x"), 0, info))


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ([16, 16], [["0.hi", "0.lo"], ["1.hi", "1.lo"]]),
        ([8, 8], [["0.hi", "0.lo", "1.hi", "1.lo"]]),
        ([8, 24, 8], [["0.hi", "0.lo"], ["1.hi"], ["1.lo", "2.hi"], ["2.lo"]]),
        ([100], [["0.hi"], ["0.lo"]]),
    ],
)
def test_files_are_filled_up_to_their_limit_and_no_further(
    elements: list[int], expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file takes 64 bytes here; a tensor that is larger has a file of its own."""
    monkeypatch.setattr(sidecar, "MAX_FILE_BYTES", 64)
    tensors = [half for number, count in enumerate(elements) for half in matrix(str(number), count)]
    files = sidecar.lay_out(tensors, "1")
    assert [[tensor.name for tensor in file.tensors] for file in files] == expected
    count = len(expected)
    assert [file.name for file in files] == [
        f"neuron/neuron-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)
    ]


def test_a_sidecar_of_several_files_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "MAX_FILE_BYTES", 80)
    source, output = float_scaled(tmp_path / "source", 3), tmp_path / "out"
    convert_checkpoint(source, output)
    paths = sorted((output / "neuron").glob("*.safetensors"))
    assert len(paths) > 2
    index = json.loads((output / "neuron" / "neuron.safetensors.index.json").read_text())
    held = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == 3 * (2 * 2 * 15 + 9)
    assert json.loads((output / "neuron_manifest.json").read_text())["sidecar"] == [
        f"neuron/{path.name}" for path in paths
    ]
    assert verify_checkpoint(output, source=source).ok

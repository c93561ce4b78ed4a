"""The fixtures' rules, configs and metadata before the libraries that defined them. Skipped where these are absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.families.layouts import Layout, write_layout
from tests.families.raw import read_metadata
from tests.families.rules import Blocks, Rule


@pytest.fixture
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    return write_layout(request.param, tmp_path)


def tensors_of(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: tensor for file in layout.files for name, tensor in load_file(layout.folder / file).items()}


def float32(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize(
    "layout",
    ["llama_channel", "llama_tensor_static", "llama_block", "llama_mxfp8", "glm_45"],
    indirect=True,
)
def test_compressed_tensors_dequantizes_alike(layout: Layout) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    config = quantization.QuantizationConfig.model_validate(layout.config["quantization_config"])
    arguments = config.config_groups["group_0"].weights
    tensors, values = tensors_of(layout), layout.dequantize()
    for weight in layout.weights:
        scale = tensors[weight.scale].float()
        if layout.name == "llama_mxfp8":
            scale = torch.exp2(scale - 127)
        found = forward.dequantize(tensors[weight.name], scale, args=arguments, dtype=torch.float32)
        assert torch.equal(found, float32(values[weight.name])), weight.name


@pytest.mark.parametrize("name", ["llama_nvfp4", "kimi_k2_thinking", "kimi_k3"])
def test_compressed_tensors_accepts_the_other_configs(name: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = write_layout(name, tmp_path).config["quantization_config"]
    assert quantization.QuantizationConfig.model_validate(config).format == config["format"]


JUDGED_BY_TRANSFORMERS = [
    "deepseek_v41",
    "deepseek_v4",
    "deepseek_v4_transformers",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "glm_5",
    "qwen3",
    "qwen3_f16",
    "qwen3_moe",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3",
    "mistral_hf",
    "mistral_hf_experts",
    "stacked_block_experts",
]


@pytest.mark.parametrize("layout", JUDGED_BY_TRANSFORMERS, indirect=True)
def test_transformers_dequantizes_alike(layout: Layout) -> None:
    """It finds the block by dividing shapes, so a weight with blocks at an edge is padded to whole ones for it."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    operation = module.Fp8Dequantize(None)
    tensors, values = tensors_of(layout), layout.dequantize()
    for weight in layout.weights:
        codes, scale = tensors[weight.name], tensors[weight.scale]
        rows, columns = codes.shape[-2:]
        grid = weight.rule.grid
        if isinstance(grid, Blocks):
            padding = (0, scale.shape[-1] * grid.columns - columns, 0, scale.shape[-2] * grid.rows - rows)
            codes = torch.nn.functional.pad(codes.view(torch.uint8), padding).view(codes.dtype)
        found = operation._dequantize_one(codes, scale, torch.float32)[..., :rows, :columns]
        assert torch.equal(found, float32(values[weight.name])), weight.name


@pytest.mark.parametrize("layout", ["deepseek_v41", "deepseek_v4"], indirect=True)
def test_transformers_unpacks_the_same_fp4_values(layout: Layout) -> None:
    """The sample's packed experts against a reading of their own: low four bits first, e8m0 scales of 32 columns."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    operation = module.Fp8Dequantize(None)
    tensors = tensors_of(layout)
    for name, scale in layout.packed:
        packed = tensors[name].view(torch.uint8).numpy()
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        expected = Rule(Blocks(1, 32))(values, tensors[scale].float().numpy())
        assert torch.equal(operation._dequantize_one(tensors[name], tensors[scale], torch.float32), float32(expected))


@pytest.mark.parametrize("layout", ["torchao"], indirect=True)
def test_torchao_puts_the_weights_together_again(layout: Layout) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    metadata = read_metadata(layout.folder / layout.files[0])
    assert metadata is not None
    rebuilt, left = support.unflatten_tensor_state_dict(tensors_of(layout), metadata)
    assert not left
    for weight in layout.weights:
        tensor = rebuilt[weight.name.replace("._weight_qdata", ".weight")]
        expected = float32(layout.dequantize()[weight.name]).to(torch.bfloat16)
        assert torch.equal(tensor.dequantize(), expected), weight.name

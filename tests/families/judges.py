"""Reads fp8 weights with the libraries that defined the families, where they are installed and run on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.families.layouts import Layout
from tests.families.raw import read_metadata
from tests.families.rules import Blocks

Read = Callable[[Layout, Path], dict[str, torch.Tensor]]
"""(layout, folder) -> the float32 values of every fp8 weight in a folder with the layout's files."""


def load(layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, by safetensors and torch."""
    return {name: tensor for file in layout.files for name, tensor in load_file(folder / file).items()}


def by_transformers(layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    """transformers' own dequantization; it divides shapes, so edge blocks are filled up to whole ones for it."""
    operation = import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    tensors, values = load(layout, folder), {}
    for weight in layout.weights:
        codes, scale = tensors[weight.name], tensors[weight.scale]
        rows, columns = codes.shape[-2:]
        grid = weight.rule.grid
        if isinstance(grid, Blocks):
            padding = (0, scale.shape[-1] * grid.columns - columns, 0, scale.shape[-2] * grid.rows - rows)
            codes = torch.nn.functional.pad(codes.view(torch.uint8), padding).view(codes.dtype)
        values[weight.name] = operation._dequantize_one(codes, scale, torch.float32)[..., :rows, :columns]
    return values


def by_compressed_tensors(layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    """compressed-tensors' own dequantization, with the arguments that it reads from the config of that folder."""
    quantization = import_module("compressed_tensors.quantization")
    dequantize = import_module("compressed_tensors.quantization.lifecycle.forward").dequantize
    config = quantization.QuantizationConfig.model_validate(layout.config["quantization_config"])
    arguments = config.config_groups["group_0"].weights
    tensors = load(layout, folder)
    return {
        weight.name: dequantize(
            tensors[weight.name], _number(tensors[weight.scale]), args=arguments, dtype=torch.float32
        )
        for weight in layout.weights
    }


def _number(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def by_torchao(layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    """The tensor subclasses that torchao puts together from a folder's tensors and header metadata."""
    support: Any = import_module("torchao.prototype.safetensors.safetensors_support")
    metadata = read_metadata(folder / layout.files[0])
    rebuilt, left = support.unflatten_tensor_state_dict(load(layout, folder), metadata)
    assert not left
    return {
        weight.name: rebuilt[weight.name.replace("._weight_qdata", ".weight")].dequantize(torch.float32)
        for weight in layout.weights
    }


_FINE_GRAINED = (
    "deepseek_v41",
    "deepseek_v4",
    "deepseek_v4_transformers",
    "deepseek_v4_transformers_fp4",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "kimi_k2",
    "glm_5",
    "qwen3",
    "qwen3_f16",
    "qwen3_moe",
    "mimo_v2_flash",
    "mimo_v25",
    "minimax_m2",
    "minimax_m3",
    "minimax_m3_released",
    "mistral_hf",
    "mistral_hf_experts",
    "stacked_block_experts",
    "fused_experts",
)
_COMPRESSED = ("llama_channel", "llama_tensor_static", "llama_block", "llama_mxfp8", "glm_45")

JUDGES: Mapping[str, tuple[str, Read]] = {
    **dict.fromkeys(_FINE_GRAINED, ("transformers", by_transformers)),
    **dict.fromkeys(_COMPRESSED, ("compressed_tensors", by_compressed_tensors)),
    "torchao": ("torchao", by_torchao),
}
"""Layout -> the library that judges its conversion, and how."""

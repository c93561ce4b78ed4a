"""ModelOpt: per tensor, per row, per block, NVFP4, and all of them in one checkpoint."""

from __future__ import annotations

import json
from typing import Any

from tests.families.builder import Builder, Package, Style, shard_names
from tests.families.deepseek import HIDDEN, INNER, VOCAB
from tests.families.deepseek import SQUARE as BLOCK_INVERSE
from tests.families.llama_model import PROJECTIONS
from tests.families.rules import Rows, SpreadBlocks, WholeTensor

SCALAR = Style(".weight_scale", WholeTensor())
CHANNEL = Style(".weight_scale", Rows(flat=True))
BLOCK = Style(".weight_scale", SpreadBlocks())


def modelopt_fp8(b: Builder) -> Package:
    """Scalar F32 scales of weights, activations and cache; the twin config file."""
    b.plain("BF16", "model.embed_tokens.weight", VOCAB, HIDDEN)
    for name, rows, columns in PROJECTIONS:
        b.fp8("model.layers.0." + name, rows, columns, style=SCALAR)
        b.activation_scale(f"model.layers.0.{name}.input_scale")
    b.activation_scale("model.layers.0.self_attn.k_proj.k_scale")
    b.activation_scale("model.layers.0.self_attn.v_proj.v_scale")
    return _modelopt("FP8", kv_cache="FP8")


def modelopt_fp8_channel(b: Builder) -> Package:
    """One scale a row, stored without a second dimension (FP8_PER_CHANNEL_PER_TOKEN)."""
    for name, rows, columns in PROJECTIONS:
        b.fp8("model.layers.0." + name, rows, columns, style=CHANNEL)
    return _modelopt("FP8_PER_CHANNEL_PER_TOKEN")


def modelopt_fp8_block(b: Builder) -> Package:
    """128 x 128 blocks whose scale has four dimensions (FP8_PB_WO)."""
    for name, rows, columns in PROJECTIONS:
        b.fp8("model.layers.0." + name, rows, columns, style=BLOCK)
    return _modelopt("FP8_PB_WO")


def modelopt_nvfp4(b: Builder) -> Package:
    """Packed e2m1 weights whose block scales are e4m3 themselves, of up to 448, beside scalar second scales."""
    for name, rows, columns in PROJECTIONS[-3:]:
        _nvfp4(b, "model.layers.0." + name, rows, columns)
    b.plain("BF16", "lm_head.weight", VOCAB, HIDDEN)
    return _modelopt("NVFP4")


def modelopt_mixed(b: Builder) -> Package:
    """NVFP4 experts beside three kinds of e4m3 weights: of the e4m3 tensors some are weights, some scales."""
    kinds = {"q_proj": (SCALAR, "FP8"), "k_proj": (BLOCK, "FP8_PB_WO"), "v_proj": (BLOCK_INVERSE, "FP8_PB_WO")}
    layers = {}
    for name, (style, algorithm) in kinds.items():
        module = f"model.layers.0.self_attn.{name}"
        b.fp8(module, 320, HIDDEN, style=style)
        layers[module] = {"quant_algo": algorithm}
    b.activation_scale("model.layers.0.self_attn.q_proj.input_scale")
    _nvfp4(b, "model.layers.0.mlp.experts.0.down_proj", HIDDEN, INNER)
    layers["model.layers.0.mlp.experts"] = {"quant_algo": "NVFP4"}
    return _modelopt("MIXED_PRECISION", quantized_layers=layers)


def _nvfp4(b: Builder, module: str, rows: int, columns: int) -> None:
    packed = b.integers("U8", module + ".weight", 256, rows, columns // 2)
    b.fp8_scale(module + ".weight_scale", rows, columns // 16)
    b.plain("F32", module + ".weight_scale_2")
    b.activation_scale(module + ".input_scale")
    b.note_packed(packed, module + ".weight_scale")


def _modelopt(algorithm: str, kv_cache: str | None = None, **more: Any) -> Package:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": kv_cache, "exclude_modules": ["lm_head"], **more}
    twin = json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    config = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", **quantization}}
    return Package(config, shard_names(2), texts={"hf_quant_config.json": twin})

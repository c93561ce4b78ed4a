"""compressed-tensors: scales by row, tensor, block and group, static ones, and formats with nothing to halve."""

from __future__ import annotations

from typing import Any

from tests.families.builder import Builder, Package, Style, shard_names
from tests.families.deepseek import HIDDEN, INNER
from tests.families.llama_model import PROJECTIONS, llama
from tests.families.raw import Stored
from tests.families.rules import Blocks, Rows, WholeTensor

CHANNEL = Style(".weight_scale", Rows(), "BF16")
CHANNEL_F32 = Style(".weight_scale", Rows())
SQUARE = Style(".weight_scale", Blocks(128, 128), "BF16")
ONE_VALUE = Style(".weight_scale", WholeTensor((1,)), "BF16")
MXFP8 = Style(".weight_scale", Blocks(1, 32), "U8")


def _config(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str, cache: bool = False) -> dict[str, Any]:
    """config.json with one group for all linear layers; `form` is the format's name."""
    group = {"format": form, "targets": ["Linear"], "weights": weights, "input_activations": inputs}
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": _float8("tensor") if cache else None,
    }
    return {"model_type": "llama", "hidden_size": HIDDEN, "quantization_config": quantization}


def _float8(strategy: str, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


def llama_channel(b: Builder) -> Package:
    """One BF16 scale a row, dynamic activations."""
    llama(b, CHANNEL)
    return Package(_config(_float8("channel"), _float8("token", dynamic=True), "float-quantized"), shard_names(2))


def llama_tensor_static(b: Builder) -> Package:
    """One BF16 scale a weight, static activation scales, scales of the key-value cache."""
    llama(b, ONE_VALUE, static="input_scale", cache=True)
    return Package(_config(_float8("tensor"), _float8("tensor"), "float-quantized", cache=True), shard_names(2))


def llama_block(b: Builder) -> Package:
    """128 x 128 blocks under compressed-tensors' name."""
    llama(b, SQUARE)
    weights = _float8("block", block_structure=[128, 128])
    return Package(_config(weights, _float8("group", dynamic=True, group_size=128), "float-quantized"))


def llama_mxfp8(b: Builder) -> Package:
    """U8 exponent bytes [n, k / 32]."""
    llama(b, MXFP8)
    weights = _float8("group", group_size=32, scale_dtype="torch.uint8")
    return Package(_config(weights, {**weights, "dynamic": True}, "mxfp8-quantized"), metadata=None)


def glm_45(b: Builder) -> Package:
    """Per-row F32 scales and static activation scales on the experts."""
    for name, rows, columns in PROJECTIONS[-3:]:
        module = f"model.layers.1.{name.replace('mlp', 'mlp.experts.0')}"
        b.fp8(module, rows, columns, style=CHANNEL_F32)
        b.activation_scale(module + ".input_scale", 1)
    b.plain("F32", "model.layers.1.mlp.gate.e_score_correction_bias", 4)
    config = _config(_float8("channel"), _float8("tensor"), "float-quantized") | {"model_type": "glm4_moe"}
    return Package(config, shard_names(2))


def kimi_k2_thinking(b: Builder) -> Package:
    """Four-bit integer experts: nothing is e4m3."""
    for expert in range(2):
        module = f"model.layers.1.mlp.experts.{expert}.gate_proj"
        packed = b.add(module + ".weight_packed", Stored("I32", (INNER, HIDDEN // 8), bytes(INNER * HIDDEN // 2)))
        b.note_packed(packed, b.plain("BF16", module + ".weight_scale", INNER, HIDDEN // 32))
        b.add(module + ".weight_shape", Stored.of("I32", [INNER, HIDDEN]))
    b.plain("BF16", "model.layers.1.self_attn.q_a_proj.weight", 160, HIDDEN)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return Package(_config(weights, None, "pack-quantized") | {"model_type": "kimi_k2"}, shard_names(2))


def kimi_k3(b: Builder) -> Package:
    """MXFP4 experts beside unquantized attention: nothing is e4m3."""
    for name, rows, columns in (("w1", INNER, HIDDEN), ("w2", HIDDEN, INNER), ("w3", INNER, HIDDEN)):
        module = f"language_model.model.layers.1.block_sparse_moe.experts.0.{name}"
        packed = b.integers("U8", module + ".weight_packed", 256, rows, columns // 2)
        b.note_packed(packed, b.integers("U8", module + ".weight_scale", 140, rows, columns // 32))
    b.plain("BF16", "language_model.model.layers.1.self_attn.o_proj.weight", HIDDEN, HIDDEN)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return Package(_config(weights, None, "mxfp4-pack-quantized") | {"model_type": "kimi_k3"}, shard_names(2))


def llama_nvfp4(b: Builder) -> Package:
    """Packed e2m1 weights whose e4m3 tensors are block scales."""
    for name, rows, columns in PROJECTIONS:
        module = "model.layers.0." + name
        packed = b.integers("U8", module + ".weight_packed", 256, rows, columns // 2)
        b.fp8_scale(module + ".weight_scale", rows, columns // 16)
        b.plain("F32", module + ".weight_global_scale", 1)
        b.note_packed(packed, module + ".weight_scale")
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    weights["scale_dtype"] = "torch.float8_e4m3fn"
    return Package(_config(weights, None, "nvfp4-pack-quantized"), metadata=None)

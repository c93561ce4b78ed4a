"""Less common forms of the families: other names, other places for the config, several schemes in one checkpoint."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.families.builder import Builder, Package, Style, shard_names
from tests.families.compressed_tensors import CHANNEL
from tests.families.compressed_tensors import SQUARE as CT_SQUARE
from tests.families.deepseek import FINE_GRAINED, HIDDEN, INNER, SQUARE, V4, V4_RENAMED, VOCAB
from tests.families.llama_model import PROJECTIONS
from tests.families.raw import Stored
from tests.families.rules import Blocks, Rows, WholeTensor

SCALAR = Style(".weight_scale", WholeTensor())
ROWS = Style(".weight_scale", Rows(), "BF16")
ROWS_FLAT = Style(".weight_scale", Rows(flat=True))
MX = Style(".weight_scale", Blocks(1, 32), "U8")
MX_INVERSE = Style(".weight_scale_inv", Blocks(1, 32), "U8")


def deepseek_inference(b: Builder) -> Package:
    """V3 as DeepSeek's inference/convert.py writes it: no `model.`, the scale called `scale`, no config.json."""
    style = Style(".scale", Blocks(128, 128))
    b.plain("BF16", "embed.weight", VOCAB, HIDDEN)
    for name, rows, columns in (("attn.wq_a", 160, HIDDEN), ("attn.wo", HIDDEN, 320), ("ffn.w1", 96, 100)):
        b.fp8(f"layers.0.{name}", rows, columns, style=style)
    b.plain("F32", "layers.0.ffn.gate.bias", 4)
    return Package({}, ("model0-mp1.safetensors",), config_file=None)


def deepseek_v4_transformers_fp4(b: Builder) -> Package:
    """transformers' names for V4 with the fp4 experts left as they are."""
    prefix = "model.layers.0."
    b.fp8(prefix + "self_attn.q_a_proj", 160, HIDDEN, style=V4_RENAMED)
    for name, rows, columns in (("gate_proj", INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        module = f"{prefix}mlp.experts.0.{name}"
        packed = b.integers("I8", module + ".weight", 128, rows, columns // 2)
        scale = Stored.of("F8_E8M0", np.exp2(b.values(rows, columns // 32).round()))
        b.note_packed(packed, b.add(module + ".weight_scale_inv", scale))
    b.mixing(prefix + "attn_hc.fn", 24, 4 * HIDDEN)
    quantization = {**FINE_GRAINED, "scale_fmt": "ue8m0"}
    return Package({"model_type": "deepseek_v4", "quantization_config": quantization}, shard_names(2))


def fused_experts(b: Builder) -> Package:
    """Experts stacked and fused as serving engines hold and dump them: `w13_weight` with `w13_weight_scale_inv`."""
    style = Style("_weight_scale_inv", Blocks(128, 128), weight_suffix="_weight")
    b.fp8("model.layers.0.mlp.experts.w13", 2, 2 * INNER, HIDDEN, style=style)
    b.fp8("model.layers.0.mlp.experts.w2", 2, HIDDEN, INNER, style=style)
    b.activation_scale("model.layers.0.mlp.experts.w13_input_scale", 2)
    return Package(
        {"model_type": "qwen3_moe", "quantization_config": dict(FINE_GRAINED)}, ("model-rank-0-part-0.safetensors",)
    )


def minimax_m3_released(b: Builder) -> Package:
    """MiniMax-M3's own config: `quant_method: mxfp8` and no `scale_fmt`."""
    b.fp8("language_model.model.layers.3.block_sparse_moe.experts.0.w1", INNER, HIDDEN, style=MX_INVERSE)
    b.fp8("language_model.model.layers.3.block_sparse_moe.experts.0.w2", HIDDEN, INNER, style=MX_INVERSE)
    quantization = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    return Package({"model_type": "minimax_m3_vl", "quantization_config": quantization}, shard_names(2), metadata=None)


def modelopt_mxfp8(b: Builder) -> Package:
    """ModelOpt's MXFP8, stated in hf_quant_config.json alone."""
    for name, rows, columns in PROJECTIONS[:4]:
        b.fp8("model.layers.0." + name, rows, columns, style=MX)
    quantization = {
        "quant_algo": "MXFP8",
        "kv_cache_quant_algo": None,
        "group_size": 32,
        "exclude_modules": ["lm_head"],
    }
    twin = json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    return Package({"model_type": "llama"}, shard_names(2), texts={"hf_quant_config.json": twin})


def compressed_groups(b: Builder) -> Package:
    """Two fp8 schemes told apart by patterns, int4 experts and a vision tower in one compressed-tensors checkpoint."""
    for name, rows, columns in PROJECTIONS:
        b.fp8("model.layers.0." + name, rows, columns, style=CT_SQUARE if "attn" in name else CHANNEL)
    module = "model.layers.1.mlp.experts.0.gate_proj"
    packed = b.add(module + ".weight_packed", Stored("I32", (INNER, HIDDEN // 8), bytes(INNER * HIDDEN // 2)))
    b.note_packed(packed, b.plain("BF16", module + ".weight_scale", INNER, HIDDEN // 32))
    b.plain("BF16", "vision_tower.blocks.0.attn.qkv.weight", 96, 32)
    float8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    int4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups: dict[str, Any] = {
        "group_0": {
            "targets": ["re:.*self_attn.*"],
            "weights": {**float8, "strategy": "block", "block_structure": [128, 128]},
        },
        "group_1": {"targets": ["re:.*layers.0.mlp.*"], "weights": {**float8, "strategy": "channel"}},
        "group_2": {"targets": ["re:.*experts.*"], "weights": int4},
    }
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    return Package({"model_type": "llama", "quantization_config": quantization}, shard_names(3))


def quark_layers(b: Builder) -> Package:
    """Quark with one value a row everywhere and one value a tensor where a pattern says so."""
    for name, rows, columns in PROJECTIONS:
        b.fp8("model.layers.0." + name, rows, columns, style=SCALAR if "o_proj" in name else ROWS_FLAT)
    spec = {"dtype": "fp8_e4m3", "is_dynamic": False, "group_size": None}
    quantization = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {**spec, "qscheme": "per_channel", "ch_axis": 0}},
        "layer_quant_config": {"*o_proj": {"weight": {**spec, "qscheme": "per_tensor", "ch_axis": None}}},
    }
    return Package({"model_type": "llama", "quantization_config": quantization})


def autofp8_cache(b: Builder) -> Package:
    """AutoFP8 with the KV cache's scales as the outputs of the projections."""
    for name, rows, columns in PROJECTIONS[:4]:
        b.fp8("model.layers.0." + name, rows, columns, style=SCALAR)
        b.activation_scale(f"model.layers.0.{name}.act_scale")
    b.activation_scale("model.layers.0.self_attn.k_proj.output_scale")
    b.activation_scale("model.layers.0.self_attn.v_proj.output_scale")
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    return Package({"model_type": "llama", "quantization_config": quantization})


def mistral_native_cache(b: Builder) -> Package:
    """Mistral's own format with scales of keys and values, which stand in no module with a weight."""
    style = Style(".qscale_weight", WholeTensor(), "BF16")
    b.fp8("layers.0.attention.wk", 64, HIDDEN, style=style)
    b.activation_scale("layers.0.attention.wk.qscale_act", dtype="BF16")
    b.activation_scale("layers.0.attention.k_fake_quantizer.qscale_act", dtype="BF16")
    b.activation_scale("layers.0.attention.v_fake_quantizer.qscale_act", dtype="BF16")
    params = {"dim": HIDDEN, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    return Package(params, ("consolidated.safetensors",), config_file="params.json")


def torchao_mx(b: Builder) -> Package:
    """torchao's MXTensor: e8m0 scales of 32 columns."""
    style = Style("._weight_scale", Blocks(1, 32), "F8_E8M0", weight_suffix="._weight_qdata")
    metadata = {"format": "pt"}
    for name, rows, columns in PROJECTIONS[:2]:
        b.fp8("model.layers.0." + name, rows, columns, style=style)
        parts = {"_type": "MXTensor", "_data": {"block_size": 32}, "_tensor_data_names": ["qdata", "scale"]}
        metadata[f"model.layers.0.{name}.weight"] = json.dumps(parts)
    metadata["tensor_names"] = json.dumps([name for name in metadata if name.startswith("model.")])
    return Package({"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}, metadata=metadata)


def tensor_powers(b: Builder) -> Package:
    """One scale a tensor and one scale a row, all powers of two: the first has a kernel form, the second rarely."""
    b.fp8("model.layers.0.mlp.up_proj", INNER, HIDDEN, style=Style(".weight_scale", WholeTensor(), power_of_two=True))
    b.fp8("model.layers.0.mlp.down_proj", HIDDEN, 128, style=Style(".weight_scale", Rows(), power_of_two=True))
    return Package({"model_type": "llama"})


def tensorrt_llm(b: Builder) -> Package:
    """TensorRT-LLM's own names, scales of the cache included."""
    style = Style(".weights_scaling_factor", WholeTensor())
    for name in ("attention.qkv", "attention.dense", "mlp.fc"):
        b.fp8(f"transformer.layers.0.{name}", HIDDEN, HIDDEN, style=style)
        b.activation_scale(f"transformer.layers.0.{name}.activation_scaling_factor")
    b.activation_scale("transformer.layers.0.attention.kv_cache_scaling_factor")
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    return Package({"architecture": "LlamaForCausalLM", "quantization": quantization}, ("rank0.safetensors",))


def quark_blocks(b: Builder) -> Package:
    """Quark's fp8 blocks where a pattern says so, in a checkpoint whose rule is MXFP4."""
    style = Style(".weight_scale", Blocks(128, 128))
    b.fp8("model.layers.0.self_attn.o_proj", 256, 384, style=style)
    b.fp8("model.layers.0.mlp.down_proj", 200, 256, style=style)
    packed = b.integers("U8", "model.layers.0.mlp.experts.0.up_proj.weight", 256, 64, 64)
    b.note_packed(packed, b.integers("U8", "model.layers.0.mlp.experts.0.up_proj.weight_scale", 120, 64, 4))
    block = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}}
    fp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    quantization = {
        "quant_method": "quark",
        "global_quant_config": {"weight": fp4},
        "layer_quant_config": {"*self_attn*": block, "*.mlp.down_proj": block},
    }
    return Package({"quantization_config": quantization})


def autoround_mxfp8(b: Builder) -> Package:
    """auto-round's MXFP8: `data_type` says that U8 scales are exponents, and the group is 32 columns."""
    b.fp8("model.layers.0.mlp.experts.0.up_proj", INNER, HIDDEN, style=MX)
    b.fp8("model.layers.0.mlp.experts.0.down_proj", HIDDEN, 128, style=MX)
    quantization = {"quant_method": "auto-round", "bits": 8, "data_type": "mx_fp", "group_size": 32, "sym": True}
    return Package({"quantization_config": quantization})


def modelopt_experts(b: Builder) -> Package:
    """Llama 4 by ModelOpt: stacked experts whose scale is `gate_up_proj_weight_scale`."""
    prefix = "language_model.model.layers.0.feed_forward."
    style = Style("_weight_scale", WholeTensor(), weight_suffix="")
    for name, rows, columns in (("gate_up_proj", HIDDEN, 2 * INNER), ("down_proj", INNER, HIDDEN)):
        b.fp8(f"{prefix}experts.{name}", 2, rows, columns, style=style)
        b.activation_scale(f"{prefix}experts.{name}_input_scale")
    b.fp8(prefix + "shared_expert.down_proj", HIDDEN, INNER, style=SCALAR)
    b.activation_scale(prefix + "shared_expert.down_proj.input_scale")
    return Package({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})


def thinker(b: Builder) -> Package:
    """Two towers with configs of their own, each under its wrapper, and a side file that says nothing of blocks."""
    b.fp8("thinker.model.layers.0.q_proj", 160, HIDDEN, style=SQUARE)
    b.fp8("talker.model.layers.0.q_proj", 160, 64, style=Style(".weight_scale_inv", Blocks(32, 32)))
    talker = {**FINE_GRAINED, "weight_block_size": [32, 32]}
    config = {
        "thinker_config": {"text_config": {"quantization_config": dict(FINE_GRAINED)}},
        "talker_config": {"quantization_config": talker},
    }
    side = json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}})
    return Package(config, texts={"hf_quant_config.json": side})


def mixed_names(b: Builder) -> Package:
    """Four naming schemes, bf16 layers, fp4 and int4 experts and a vision tower, scattered over the shards."""
    b.plain("BF16", "model.embed_tokens.weight", VOCAB, HIDDEN)
    b.fp8("layers.0.attn.wq_a", 160, HIDDEN, style=V4)
    b.fp4("layers.0.ffn.experts.0.w1", INNER, HIDDEN)
    b.fp8("model.layers.1.self_attn.q_proj", 320, HIDDEN, style=SQUARE)
    b.fp8("model.layers.2.self_attn.q_proj", 320, HIDDEN, style=ROWS)
    b.fp8("layers.3.attention.wq", 64, HIDDEN, style=Style(".qscale_weight", WholeTensor(), "BF16"))
    b.plain("BF16", "model.layers.4.self_attn.q_proj.weight", 320, HIDDEN)
    packed = b.add("model.layers.5.mlp.weight_packed", Stored("I32", (INNER, HIDDEN // 8), bytes(INNER * HIDDEN // 2)))
    b.note_packed(packed, b.plain("BF16", "model.layers.5.mlp.weight_scale", INNER, HIDDEN // 32))
    b.plain("BF16", "vision_tower.blocks.0.attn.qkv.weight", 96, 32)
    b.plain("F32", "vision_tower.blocks.0.norm.scale", 32)
    quantization = dict(FINE_GRAINED)
    return Package({"model_type": "mixed", "quantization_config": quantization}, shard_names(5), scatter=True)

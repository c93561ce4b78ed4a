"""compressed-tensors, ModelOpt, MXFP4, Mistral's own files, FBGEMM, AutoFP8, Quark, torchao, diffusion models."""

from __future__ import annotations

import json
from typing import Any

from .builder import Builder, Package, Style, shard_names
from .deepseek import HIDDEN, INNER, VOCAB
from .raw import Stored
from .rules import Blocks, Rows, WholeTensor

CHANNEL = Style(".weight_scale", Rows(), "BF16")
CHANNEL_F32 = Style(".weight_scale", Rows())
SQUARE = Style(".weight_scale", Blocks(128, 128), "BF16")
SCALAR = Style(".weight_scale", WholeTensor())
ONE_VALUE = Style(".weight_scale", WholeTensor((1,)), "BF16")

PROJECTIONS = (
    ("self_attn.q_proj", 320, HIDDEN),
    ("self_attn.k_proj", 64, HIDDEN),
    ("self_attn.v_proj", 64, HIDDEN),
    ("self_attn.o_proj", HIDDEN, 320),
    ("mlp.gate_proj", INNER, HIDDEN),
    ("mlp.up_proj", INNER, HIDDEN),
    ("mlp.down_proj", HIDDEN, INNER),
)


def _llama(b: Builder, style: Style, static: str = "", cache: bool = False) -> None:
    """Two Llama layers; `static` names the activation scales (shaped as a per-tensor weight's), `cache` adds scales of
    keys and values."""
    b.plain("BF16", "model.embed_tokens.weight", VOCAB, HIDDEN)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in PROJECTIONS:
            b.fp8(prefix + name, rows, columns, style=style)
            if static:
                shape = style.grid.scale_shape((rows, columns))
                b.activation_scale(f"{prefix}{name}.{static}", *shape, dtype=style.scale_dtype)
        if cache:
            b.activation_scale(prefix + "self_attn.k_scale", dtype="F32")
            b.activation_scale(prefix + "self_attn.v_scale", dtype="F32")
        b.plain("BF16", prefix + "input_layernorm.weight", HIDDEN)
    b.plain("BF16", "lm_head.weight", VOCAB, HIDDEN)


def _compressed(
    strategy: str, dynamic: bool, *, cache: bool = False, layout: str = "float-quantized"
) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    weights |= {"strategy": strategy, "block_structure": [128, 128] if strategy == "block" else None}
    inputs = {"num_bits": 8, "type": "float", "dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"} if cache else None,
    }
    return {"model_type": "llama", "hidden_size": HIDDEN, "quantization_config": quantization}


def llama_channel(b: Builder) -> Package:
    """One BF16 scale a row, dynamic activations."""
    _llama(b, CHANNEL)
    return Package(_compressed("channel", dynamic=True), shard_names(2))


def llama_tensor_static(b: Builder) -> Package:
    """One BF16 scale a weight, static activation scales, scales of the key-value cache."""
    _llama(b, ONE_VALUE, static="input_scale", cache=True)
    return Package(_compressed("tensor", dynamic=False, cache=True), shard_names(2))


def llama_block(b: Builder) -> Package:
    """128 x 128 blocks under compressed-tensors' name."""
    _llama(b, SQUARE)
    return Package(_compressed("block", dynamic=True))


def llama_mxfp8(b: Builder) -> Package:
    """U8 exponent bytes [n, k / 32]."""
    _llama(b, Style(".weight_scale", Blocks(1, 32), "U8"))
    config = _compressed("group", dynamic=True, layout="mxfp8-quantized")
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= {"group_size": 32, "scale_dtype": "uint8"}
    return Package(config)


def glm_45(b: Builder) -> Package:
    """Per-row F32 scales and static activation scales on the experts."""
    for name, rows, columns in PROJECTIONS[-3:]:
        module = f"model.layers.1.{name.replace('mlp', 'mlp.experts.0')}"
        b.fp8(module, rows, columns, style=CHANNEL_F32)
        b.activation_scale(module + ".input_scale", 1)
    b.plain("F32", "model.layers.1.mlp.gate.e_score_correction_bias", 4)
    config = _compressed("channel", dynamic=False) | {"model_type": "glm4_moe"}
    return Package(config, shard_names(2))


def kimi_k2_thinking(b: Builder) -> Package:
    """Four-bit integer experts: nothing is e4m3."""
    for expert in range(2):
        module = f"model.layers.1.mlp.experts.{expert}.gate_proj"
        packed = b.add(module + ".weight_packed", Stored("I32", (INNER, HIDDEN // 8), bytes(INNER * HIDDEN // 2)))
        b.note_packed(packed, b.plain("BF16", module + ".weight_scale", INNER, HIDDEN // 32))
        b.add(module + ".weight_shape", Stored.of("I32", [INNER, HIDDEN]))
    b.plain("BF16", "model.layers.1.self_attn.q_a_proj.weight", 160, HIDDEN)
    config = _compressed("group", dynamic=True, layout="pack-quantized") | {"model_type": "kimi_k2"}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config["quantization_config"]["config_groups"]["group_0"] = {"targets": ["Linear"], "weights": weights}
    return Package(config, shard_names(2))


def modelopt_fp8(b: Builder) -> Package:
    """Scalar F32 scales of weights, activations and cache; the twin config file."""
    b.plain("BF16", "model.embed_tokens.weight", VOCAB, HIDDEN)
    for name, rows, columns in PROJECTIONS:
        b.fp8("model.layers.0." + name, rows, columns, style=SCALAR)
        b.activation_scale(f"model.layers.0.{name}.input_scale")
    b.activation_scale("model.layers.0.self_attn.k_proj.k_scale")
    b.activation_scale("model.layers.0.self_attn.v_proj.v_scale")
    return _modelopt("FP8", kv_cache="FP8")


def modelopt_fp8_block(b: Builder) -> Package:
    """ModelOpt's block variant (FP8_PB_WO): scales of [n / 128, 1, k / 128, 1] squeezed to two dimensions."""
    for name, rows, columns in PROJECTIONS:
        b.fp8("model.layers.0." + name, rows, columns, style=Style(".weight_scale", Blocks(128, 128)))
    return _modelopt("FP8_PB_WO")


def modelopt_nvfp4(b: Builder) -> Package:
    """Packed e2m1 weights whose block scales are e4m3 themselves, of up to 448, beside scalar second scales."""
    for name, rows, columns in PROJECTIONS[-3:]:
        module = "model.layers.0." + name
        b.integers("U8", module + ".weight", 256, rows, columns // 2)
        b.fp8_scale(module + ".weight_scale", rows, columns // 16)
        b.plain("F32", module + ".weight_scale_2")
        b.activation_scale(module + ".input_scale")
        b.note_packed(module + ".weight", module + ".weight_scale")
    b.plain("BF16", "lm_head.weight", VOCAB, HIDDEN)
    return _modelopt("NVFP4")


def modelopt_mixed(b: Builder) -> Package:
    """NVFP4 experts beside e4m3 attention: one e4m3 tensor is a weight, the next one a scale."""
    b.fp8("model.layers.0.self_attn.q_proj", 320, HIDDEN, style=SCALAR)
    b.activation_scale("model.layers.0.self_attn.q_proj.input_scale")
    module = "model.layers.0.mlp.experts.0.down_proj"
    b.integers("U8", module + ".weight", 256, HIDDEN, INNER // 2)
    b.fp8_scale(module + ".weight_scale", HIDDEN, INNER // 16)
    b.plain("F32", module + ".weight_scale_2")
    b.note_packed(module + ".weight", module + ".weight_scale")
    return _modelopt("MIXED_PRECISION")


def _modelopt(algorithm: str, kv_cache: str | None = None) -> Package:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": kv_cache, "exclude_modules": ["lm_head"]}
    twin = json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    config = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", **quantization}}
    return Package(config, shard_names(2), texts={"hf_quant_config.json": twin})


def gpt_oss(b: Builder) -> Package:
    """MXFP4 experts as U8 blocks and U8 scales."""
    prefix = "model.layers.0.mlp.experts."
    for name, rows, groups in (("gate_up_proj", 2 * INNER, HIDDEN // 32), ("down_proj", HIDDEN, INNER // 32)):
        blocks = b.integers("U8", f"{prefix}{name}_blocks", 256, 2, rows, groups, 16)
        b.note_packed(blocks, b.integers("U8", f"{prefix}{name}_scales", 140, 2, rows, groups))
        b.plain("BF16", f"{prefix}{name}_bias", 2, rows)
    b.plain("BF16", "model.layers.0.self_attn.sinks", 8)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return Package({"model_type": "gpt_oss", "quantization_config": quantization})


def mistral_native(b: Builder) -> Package:
    """Mistral's own file: no config.json, `qscale_weight` and `qscale_act`."""
    style = Style(".qscale_weight", WholeTensor(), "BF16")
    b.plain("BF16", "tok_embeddings.weight", VOCAB, HIDDEN)
    for name, rows, columns in (("attention.wq", 320, HIDDEN), ("feed_forward.w2", HIDDEN, INNER)):
        b.fp8("layers.0." + name, rows, columns, style=style)
        b.activation_scale(f"layers.0.{name}.qscale_act", dtype="BF16")
    b.plain("BF16", "norm.weight", HIDDEN)
    params = {"dim": HIDDEN, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    return Package(params, ("consolidated.safetensors",), config_file="params.json")


def fbgemm(b: Builder) -> Package:
    """Per-row scales and upper bounds of the activations, which are no scales."""
    for name, rows, columns in PROJECTIONS[-3:]:
        b.fp8("model.layers.0." + name, rows, columns, style=CHANNEL_F32)
        b.add(f"model.layers.0.{name}.input_scale_ub", Stored.of("F32", [1200.0]))
    quantization = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    return Package({"model_type": "llama", "quantization_config": quantization}, shard_names(2))


def autofp8(b: Builder) -> Package:
    """Scalar scales, static activations under today's name."""
    _llama(b, SCALAR, static="input_scale")
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return Package({"model_type": "llama", "quantization_config": quantization})


def autofp8_old(b: Builder) -> Package:
    """The first AutoFP8 files: `act_scale`, and a config that says nothing."""
    _llama(b, SCALAR, static="act_scale")
    return Package({"model_type": "llama"})


def quark(b: Builder) -> Package:
    """Quark's per-tensor export with static activations and a scale of the cache."""
    _llama(b, SCALAR, static="input_scale", cache=True)
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None, "group_size": None}
    quantization = {
        "quant_method": "quark",
        "global_quant_config": {"weight": spec, "input_tensors": spec, "bias": None, "output_tensors": None},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {
            "kv_cache_group": ["*k_proj", "*v_proj"],
            "weight_format": "real_quantized",
            "pack_method": "reorder",
        },
    }
    return Package({"model_type": "llama", "quantization_config": quantization}, shard_names(2))


def torchao(b: Builder) -> Package:
    """Float8Tensor taken apart: other names, and header metadata that puts it together again."""
    style = Style("._weight_scale", Rows(), weight_suffix="._weight_qdata")
    metadata = {"format": "pt"}
    names = []
    for name, rows, columns in PROJECTIONS[:2]:
        b.fp8("model.layers.0." + name, rows, columns, style=style)
        names.append(f"model.layers.0.{name}.weight")
        parts = {
            "_type": "Float8Tensor",
            "_data": {"block_size": [1, columns]},
            "_tensor_data_names": ["qdata", "scale"],
        }
        metadata[names[-1]] = json.dumps(parts)
    names.append(b.plain("BF16", "model.layers.0.input_layernorm.weight", HIDDEN))
    metadata[names[-1]] = json.dumps({"_type": "Tensor"})
    metadata["tensor_names"] = json.dumps(names)
    kind = {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2, "_data": {}}}
    config = {"model_type": "llama", "quantization_config": {"quant_method": "torchao", "quant_type": kind}}
    return Package(config, metadata=metadata)


DIFFUSION = (("double_blocks.0.img_attn.qkv", 384, 128), ("double_blocks.0.img_mlp.0", 256, 128))


def diffusion_scaled(b: Builder) -> Package:
    """The older ComfyUI form: `scale_weight`, `scale_input`, and a marker that is an e4m3 tensor itself."""
    for module, rows, columns in DIFFUSION:
        b.fp8(module, rows, columns, style=Style(".scale_weight", WholeTensor()))
        b.activation_scale(module + ".scale_input")
    b.marker("scaled_fp8", 2)
    b.plain("BF16", "double_blocks.0.img_attn.norm.key_norm.scale", 64)
    return Package({}, ("diffusion_pytorch_model.safetensors",), config_file=None)


def diffusion_comfy_quant(b: Builder) -> Package:
    """The newer ComfyUI form: `weight_scale`, and JSON in a U8 tensor beside each weight and in the header."""
    layers = {}
    for module, rows, columns in DIFFUSION:
        b.fp8(module, rows, columns, style=SCALAR)
        b.activation_scale(module + ".input_scale")
        layers[module] = {"format": "float8_e4m3fn"}
        text = json.dumps(layers[module]).encode()
        b.add(module + ".comfy_quant", Stored("U8", (len(text),), text))
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    return Package({}, ("model.safetensors",), config_file=None, metadata=metadata)


def diffusion_cast(b: Builder) -> Package:
    """Plain casts without any scale, all of them small: no code that the hardware reads differently."""
    for module, rows, columns in DIFFUSION:
        b.fp8_unscaled(module + ".weight", rows, columns)
        b.plain("BF16", module + ".bias", rows)
    return Package({}, config_file=None)


def diffusion_cast_large(b: Builder) -> Package:
    """Plain casts with values above 240."""
    for module, rows, columns in DIFFUSION:
        b.fp8_unscaled(module + ".weight", rows, columns, spread=4000)
    return Package({}, config_file=None)


def diffusion_e5m2(b: Builder) -> Package:
    """The other eight-bit float: nothing is e4m3."""
    for module, rows, columns in DIFFUSION:
        b.plain("F8_E5M2", module + ".weight", rows, columns)
    return Package({}, config_file=None)


def transformer_engine(b: Builder) -> Package:
    """Transformer Engine: an e4m3 weight whose scale lies only within the opaque `_extra_state` beside it."""
    b.fp8_unscaled("decoder.layers.0.mlp.linear_fc1.weight", 128, 128, spread=4000)
    b.plain("BF16", "decoder.layers.0.mlp.linear_fc2.weight", 128, 128)
    for module in ("linear_fc1", "linear_fc2"):
        b.integers("U8", f"decoder.layers.0.mlp.{module}._extra_state", 256, 256)
    return Package({"model_type": "megatron"})

"""MXFP4, Mistral's own files, FBGEMM, AutoFP8, Quark, torchao, diffusion models, Transformer Engine."""

from __future__ import annotations

import json

from tests.families.builder import Builder, Package, Style, shard_names
from tests.families.deepseek import HIDDEN, INNER, VOCAB
from tests.families.llama_model import PROJECTIONS, llama
from tests.families.raw import Stored
from tests.families.rules import Rows, WholeTensor

CHANNEL_F32 = Style(".weight_scale", Rows())
SCALAR = Style(".weight_scale", WholeTensor())


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
    llama(b, SCALAR, static="input_scale")
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return Package({"model_type": "llama", "quantization_config": quantization})


def autofp8_old(b: Builder) -> Package:
    """The first AutoFP8 files: `act_scale`, and a config that says nothing."""
    llama(b, SCALAR, static="act_scale")
    return Package({"model_type": "llama"})


def quark(b: Builder) -> Package:
    """Quark's per-tensor export with static activations and a scale of the cache."""
    llama(b, SCALAR, static="input_scale", cache=True)
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
        data = {
            "block_size": [1, columns],
            "mm_config": None,
            "act_quant_kwargs": None,
            "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
            "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        }
        parts = {"_type": "Float8Tensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}
        metadata[names[-1]] = json.dumps(parts)
    names.append(b.plain("BF16", "model.layers.0.input_layernorm.weight", HIDDEN))
    metadata[names[-1]] = json.dumps({"_type": "Tensor"})
    metadata["tensor_names"] = json.dumps(names)
    kind = {"default": {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {}}}
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

"""`weight_scale_inv` in its other forms: BF16, F16 and U8, shared and per tensor, odd grids, stacked experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.families.builder import Builder, Package, Style, shard_names
from tests.families.deepseek import FINE_GRAINED, HIDDEN, INNER, SQUARE, VOCAB
from tests.families.rules import Blocks, Experts, GroupedBlocks, Rows, WholeTensor

QWEN = Style(".weight_scale_inv", Blocks(128, 128), "BF16")
QWEN_F16 = Style(".weight_scale_inv", Blocks(128, 128), "F16")
MXFP8 = Style(".weight_scale_inv", Blocks(1, 32), "U8")
MISTRAL = Style(".weight_scale_inv", WholeTensor(), "BF16")


def qwen3(b: Builder) -> Package:
    """BF16 scales; the head and the norms stay as they are."""
    _dense_model(b, QWEN)
    return Package(_qwen_config("qwen3"), shard_names(2))


def qwen3_f16(b: Builder) -> Package:
    """F16 scales, in one file without an index."""
    _dense_model(b, QWEN_F16)
    return Package(_qwen_config("qwen3"))


def qwen3_moe(b: Builder) -> Package:
    """BF16 scales on experts with a block at the edge in both directions."""
    b.plain("BF16", "model.embed_tokens.weight", VOCAB, HIDDEN)
    for expert in range(3):
        prefix = f"model.layers.0.mlp.experts.{expert}."
        b.fp8(prefix + "gate_proj", 200, 328, style=QWEN)
        b.fp8(prefix + "up_proj", 200, 328, style=QWEN)
        b.fp8(prefix + "down_proj", 328, 200, style=QWEN)
    b.plain("BF16", "model.layers.0.mlp.gate.weight", 3, 328)
    return Package(_qwen_config("qwen3_moe"), shard_names(2))


def qwen38_ngram(b: Builder) -> Package:
    """N-gram table shards that share one BF16 scale named after the table, beside BF16-scaled weights."""
    prefix = "model.language_model.layers.1.ple.ple_embedding."
    shards = [f"{prefix}ngram_embedding.shard_{n}.weight" for n in range(8)]
    style = Style("", WholeTensor((1,)), "BF16")
    b.fp8_shared(shards, prefix + "ngram_embedding.weight_scale", 50, 160, style=style)
    b.integers("I64", prefix + "layer_multipliers", 1 << 40, 3)
    b.fp8("model.language_model.layers.0.mlp.experts.0.gate_proj", INNER, HIDDEN, style=QWEN)
    b.plain("F32", "model.language_model.layers.0.hyper_connection_mixer.input_mix_weight_down.weight", 4, HIDDEN)
    return Package(_nested(_qwen_config("qwen4_exp")), shard_names(4), scatter=True)


def qwen38_ngram_scalar(b: Builder) -> Package:
    """The same table in the other spelling: `shards.N`, the scale a true scalar."""
    prefix = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."
    shards = [f"{prefix}shards.{n}.weight" for n in range(4)]
    b.fp8_shared(shards, prefix + "weight_scale", 50, 160, style=Style("", WholeTensor(), "BF16"))
    return Package(_nested(_qwen_config("qwen4_exp")), shard_names(2))


def qwen38_ngram_rows(b: Builder) -> Package:
    """A rebuild of the table with one scale a row."""
    for n in range(4):
        module = f"model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_{n}"
        b.fp8(module, 50, 160, style=Style(".weight_scale", Rows(), "BF16"))
    return Package(_nested(_qwen_config("qwen4_exp")), shard_names(2))


def _dense_model(b: Builder, style: Style, prefix: str = "model.") -> None:
    fp8 = partial(b.fp8, style=style)
    b.plain("BF16", prefix + "embed_tokens.weight", VOCAB, HIDDEN)
    for layer in range(2):
        attn, mlp = f"{prefix}layers.{layer}.self_attn.", f"{prefix}layers.{layer}.mlp."
        fp8(attn + "q_proj", 320, HIDDEN)
        fp8(attn + "k_proj", 64, HIDDEN)
        fp8(attn + "v_proj", 64, HIDDEN)
        fp8(attn + "o_proj", HIDDEN, 320)
        fp8(mlp + "gate_proj", INNER, HIDDEN)
        fp8(mlp + "up_proj", INNER, HIDDEN)
        fp8(mlp + "down_proj", HIDDEN, INNER)
        b.plain("BF16", attn + "q_norm.weight", 64)
    b.plain("BF16", prefix + "norm.weight", HIDDEN)
    b.plain("BF16", "lm_head.weight", VOCAB, HIDDEN)


def _qwen_config(model_type: str) -> dict[str, Any]:
    quantization = {**FINE_GRAINED, "modules_to_not_convert": ["lm_head"]}
    return {"model_type": model_type, "hidden_size": HIDDEN, "quantization_config": quantization}


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    outer = ("quantization_config", "model_type")
    text = {key: value for key, value in config.items() if key not in outer}
    return {**{key: config[key] for key in outer}, "text_config": text, "vision_config": {"depth": 1}}


def mimo_v2_flash(b: Builder) -> Package:
    """Separate projections on an ordinary grid, with modules named as ignored."""
    _dense_model(b, SQUARE)
    b.plain("F32", "model.layers.0.mlp.gate.e_score_correction_bias", 4)
    return Package(_mimo_config(), shard_names(2))


def mimo_v25_pro(b: Builder) -> Package:
    """A fused qkv quantized by rank: 8 ranges of 212 rows take 2 block rows each, 16 where ceil(1696 / 128) is 14."""
    b.fp8("model.layers.0.self_attn.qkv_proj", 8 * 212, HIDDEN, style=_fused(8))
    b.fp8("model.layers.0.self_attn.o_proj", HIDDEN, 320, style=SQUARE)
    return Package(_mimo_config(), shard_names(2, "model_{}_of_{}.safetensors"))


def mimo_v25(b: Builder) -> Package:
    """A fused qkv in 4 ranges of whole blocks: the grid looks ordinary, the row order is not."""
    b.fp8("model.layers.1.self_attn.qkv_proj", 4 * 256, HIDDEN, style=_fused(4))
    b.plain("BF16", "model.layers.1.input_layernorm.weight", HIDDEN)
    return Package(_mimo_config())


def _fused(groups: int) -> Style:
    return Style(".weight_scale_inv", GroupedBlocks(groups))


def _mimo_config() -> dict[str, Any]:
    quantization = {**FINE_GRAINED, "ignored_layers": ["lm_head", "model.layers.0.mlp.gate"]}
    return {"model_type": "mimo_v2", "hidden_size": HIDDEN, "quantization_config": quantization}


def minimax_m2(b: Builder) -> Package:
    """One layer scattered over many shards: most scales lie in another file than their weight."""
    prefix = "model.layers.0."
    for name, rows in (("q_proj", 384), ("k_proj", 128), ("v_proj", 128)):
        b.fp8(f"{prefix}self_attn.{name}", rows, HIDDEN, style=SQUARE)
    b.fp8(prefix + "self_attn.o_proj", HIDDEN, 384, style=SQUARE)
    for expert in range(3):
        moe = f"{prefix}block_sparse_moe.experts.{expert}."
        b.fp8(moe + "w1", INNER, HIDDEN, style=SQUARE)
        b.fp8(moe + "w2", HIDDEN, INNER, style=SQUARE)
        b.fp8(moe + "w3", INNER, HIDDEN, style=SQUARE)
    b.plain("F32", prefix + "block_sparse_moe.gate.weight", 3, HIDDEN)
    b.plain("F32", prefix + "block_sparse_moe.e_score_correction_bias", 3)
    config = {"model_type": "minimax_m2", "quantization_config": dict(FINE_GRAINED)}
    return Package(config, shard_names(7), scatter=True)


def minimax_m3(b: Builder) -> Package:
    """Scales as bare exponent bytes (U8) for 1 x 32 blocks, in files with empty header metadata."""
    for name, rows, columns in (("w1", 96, HIDDEN), ("w2", HIDDEN, 96), ("w3", 96, HIDDEN)):
        b.fp8(f"model.layers.0.block_sparse_moe.experts.0.{name}", rows, columns, style=MXFP8)
    b.fp8("model.layers.0.self_attn.q_proj", 100, HIDDEN, style=MXFP8)
    b.plain("BF16", "lm_head.weight", VOCAB, HIDDEN)
    quantization = {**FINE_GRAINED, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    return Package({"model_type": "minimax_m3", "quantization_config": quantization}, shard_names(2), metadata={})


def mistral_hf(b: Builder) -> Package:
    """Scalar BF16 scales and static activation scales."""
    _static_linear(b, "model.language_model.layers.0.self_attn.q_proj", 320, HIDDEN)
    _static_linear(b, "model.language_model.layers.0.mlp.down_proj", HIDDEN, INNER)
    b.plain("BF16", "model.vision_tower.ln_pre.weight", 32)
    return Package(_mistral_config(), shard_names(2))


def mistral_hf_experts(b: Builder) -> Package:
    """Stacked experts: the weight has no `.weight`, its scale is [experts, 1, 1] and hangs on by an underscore."""
    prefix = "model.language_model.layers.0."
    style = Style("_scale_inv", Experts(), weight_suffix="")
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        b.fp8(f"{prefix}mlp.experts.{name}", 3, rows, columns, style=style)
        b.activation_scale(f"{prefix}mlp.experts.{name}_activation_scale", 3)
    _static_linear(b, prefix + "self_attn.o_proj", HIDDEN, 320)
    return Package(_mistral_config())


def stacked_block_experts(b: Builder) -> Package:
    """Stacked experts as transformers holds them in memory and some repacks save them: 3-D blocks."""
    style = Style("_scale_inv", Blocks(128, 128), weight_suffix="")
    b.fp8("model.layers.0.mlp.experts.gate_up_proj", 2, 2 * INNER, HIDDEN, style=style)
    b.fp8("model.layers.0.mlp.experts.down_proj", 2, HIDDEN, INNER, style=style)
    b.plain("BF16", "model.layers.0.mlp.gate.weight", 2, HIDDEN)
    return Package({"model_type": "glm_moe_dsa", "quantization_config": dict(FINE_GRAINED)})


def _static_linear(b: Builder, module: str, rows: int, columns: int) -> None:
    b.fp8(module, rows, columns, style=MISTRAL)
    b.activation_scale(module + ".activation_scale", dtype="BF16")


def _mistral_config() -> dict[str, Any]:
    return {
        "model_type": "mistral3",
        "quantization_config": {
            "activation_scheme": "static",
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": None,
        },
    }

"""DeepSeek V3 to V4.1 and the families with the same layout: Kimi-K2, GLM-5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from make_checkpoint import TINY, Quantized, source_values, write_checkpoint
from sample_checkpoint.extras import config as v41_config

from tests.families.builder import Builder, Fp8Weight, Layout, Package, Style, shard_names
from tests.families.raw import read_files
from tests.families.rules import Blocks, Rule

SQUARE = Style(".weight_scale_inv", Blocks(128, 128))
SQUARE_POWER = Style(".weight_scale_inv", Blocks(128, 128), power_of_two=True)
V4 = Style(".scale", Blocks(128, 128), "F8_E8M0")
V4_RENAMED = Style(".weight_scale_inv", Blocks(128, 128), "F8_E8M0")

FINE_GRAINED: Mapping[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

HIDDEN, INNER, VOCAB = 256, 192, 96


def deepseek_v41(folder: Path, seed: int) -> Layout:
    """The sample generator's smallest checkpoint."""
    sample = write_checkpoint(folder, replace(TINY, seed=seed))
    files = tuple(shard.filename for shard in sample.shards)
    quantized = [entry for entry in sample.entries if isinstance(entry, Quantized)]
    return Layout(
        name="deepseek_v41",
        folder=folder,
        files=files,
        config=v41_config(sample.dims),
        weights=tuple(
            Fp8Weight(e.name, e.scale.name, Rule(Blocks(e.block_rows, 32)), source_values(e, seed).astype("float64"))
            for e in quantized
            if e.element == "e4m3"
        ),
        packed=tuple((e.name, e.scale.name) for e in quantized if e.element == "e2m1"),
        mixing=tuple(name for name in read_files(folder, files) if name.endswith("_fn")),
    )


def deepseek_v4(b: Builder) -> Package:
    """V4: the file's own names, e8m0 scales of 128 x 128, fp4 experts, hash-routed first layers, a mixed head."""
    _v4_model(b, experts_fp8=False)
    return Package(_v4_config(expert_dtype="fp4"), shard_names(3))


def deepseek_v4_fp8_experts(b: Builder) -> Package:
    """A repack with e4m3 experts whose draft projections lost their scales, and a config without expert_dtype."""
    _v4_model(b, experts_fp8=True)
    return Package(_v4_config(), shard_names(2))


def _v4_config(**root: str) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "n_routed_experts": 2,
        "hc_mult": 4,
        "compress_ratios": [0, 4, 0],
        "num_hash_layers": 1,
        "num_nextn_predict_layers": 1,
        "quantization_config": {**FINE_GRAINED, "scale_fmt": "ue8m0"},
        **root,
    }


def _v4_model(b: Builder, experts_fp8: bool) -> None:
    b.plain("BF16", "embed.weight", VOCAB, HIDDEN)
    for layer in range(2):
        _v4_block(b, f"layers.{layer}.", experts_fp8, hashed=layer == 0)
    _v4_compressed(b, "layers.1.attn.")
    _v4_block(b, "mtp.0.", experts_fp8, hashed=False)
    for name in ("e_proj", "h_proj"):
        if experts_fp8:
            b.fp8_unscaled(f"mtp.0.{name}.weight", HIDDEN, HIDDEN, spread=2000)
        else:
            b.fp8(f"mtp.0.{name}", HIDDEN, HIDDEN, style=V4)
    for name in ("enorm", "hnorm", "norm"):
        b.plain("BF16", f"mtp.0.{name}.weight", HIDDEN)
    for prefix in ("mtp.0.", ""):
        b.mixing(prefix + "hc_head_fn", 4, 4 * HIDDEN)
        b.plain("F32", prefix + "hc_head_base", 4)
        b.plain("F32", prefix + "hc_head_scale", 1)
    b.plain("BF16", "norm.weight", HIDDEN)
    b.plain("BF16", "head.weight", VOCAB, HIDDEN)


def _v4_block(b: Builder, prefix: str, experts_fp8: bool, hashed: bool) -> None:
    fp8 = partial(b.fp8, style=V4)
    attn, ffn = prefix + "attn.", prefix + "ffn."
    fp8(attn + "wq_a", 160, HIDDEN)
    fp8(attn + "wq_b", 512, 160)
    fp8(attn + "wkv", 64, HIDDEN)
    fp8(attn + "wo_a", 192, 128)
    fp8(attn + "wo_b", HIDDEN, 192)
    b.plain("F32", attn + "attn_sink", 8)
    b.plain("BF16", attn + "q_norm.weight", 160)
    b.plain("BF16", attn + "kv_norm.weight", 64)
    b.plain("BF16", ffn + "gate.weight", 2, HIDDEN)
    if hashed:
        b.integers("I64", ffn + "gate.tid2eid", 2, VOCAB, 2)
    else:
        b.plain("F32", ffn + "gate.bias", 2)
    for name, rows, columns in (("w1", INNER, HIDDEN), ("w2", HIDDEN, INNER), ("w3", INNER, HIDDEN)):
        for expert in range(2):
            (fp8 if experts_fp8 else b.fp4)(f"{ffn}experts.{expert}.{name}", rows, columns)
        fp8(f"{ffn}shared_experts.{name}", rows, columns)
    for part in ("attn", "ffn"):
        b.plain("BF16", f"{prefix}{part}_norm.weight", HIDDEN)
        b.mixing(f"{prefix}hc_{part}_fn", 24, 4 * HIDDEN)
        b.plain("F32", f"{prefix}hc_{part}_base", 24)
        b.plain("F32", f"{prefix}hc_{part}_scale", 3)


def _v4_compressed(b: Builder, attn: str) -> None:
    b.fp8(attn + "indexer.wq_b", 256, 160, style=V4)
    b.plain("BF16", attn + "indexer.weights_proj.weight", 8, HIDDEN)
    for prefix, width in ((attn + "compressor.", 64), (attn + "indexer.compressor.", 32)):
        b.plain("BF16", prefix + "wkv.weight", 2 * width, HIDDEN)
        b.plain("BF16", prefix + "wgate.weight", 2 * width, HIDDEN)
        b.plain("F32", prefix + "ape", 4, 2 * width)
        b.plain("BF16", prefix + "norm.weight", width)


def deepseek_v4_transformers(b: Builder) -> Package:
    """V4 as transformers names it, with one hyper-connection's `scale` caught by the rename of `.scale`."""
    fp8 = partial(b.fp8, style=V4_RENAMED)
    b.plain("BF16", "model.embed_tokens.weight", VOCAB, HIDDEN)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for part in ("attn", "ffn"):
            b.mixing(f"{prefix}{part}_hc.fn", 24, 4 * HIDDEN)
            b.plain("F32", f"{prefix}{part}_hc.base", 24)
            b.plain("F32", f"{prefix}{part}_hc.{'scale' if layer else 'weight_scale_inv'}", 3)
        attn = prefix + "self_attn."
        fp8(attn + "q_a_proj", 160, HIDDEN)
        fp8(attn + "q_b_proj", 512, 160)
        fp8(attn + "kv_proj", 64, HIDDEN)
        fp8(attn + "o_a_proj", 192, 128)
        fp8(attn + "o_b_proj", HIDDEN, 192)
        b.plain("F32", attn + "sinks", 8)
        b.plain("F32", attn + "compressor.position_bias", 4, 128)
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
            fp8(f"{prefix}mlp.shared_experts.{name}", *shape)
            fp8(f"{prefix}mlp.experts.0.{name}", *shape)
        b.plain("BF16", prefix + "mlp.gate.weight", 2, HIDDEN)
        b.plain("F32", prefix + "mlp.gate.e_score_correction_bias", 2)
    b.mixing("model.hc_head.hc_fn", 4, 4 * HIDDEN)
    b.plain("F32", "model.hc_head.hc_base", 4)
    b.plain("F32", "model.hc_head.hc_scale", 1)
    b.plain("BF16", "lm_head.weight", VOCAB, HIDDEN)
    return Package(_v4_config(), shard_names(2))


def deepseek_v3(b: Builder) -> Package:
    """V3 and R1: float scales of any value; layer 2 is the draft layer with copies of embedding and head."""
    _v3_model(b, SQUARE)
    return Package(_v3_config("deepseek_v3", "DeepseekV3ForCausalLM"), shard_names(3))


def deepseek_v31(b: Builder) -> Package:
    """V3.1: as V3, but every scale is a power of two."""
    _v3_model(b, SQUARE_POWER)
    config = _v3_config("deepseek_v3", "DeepseekV3ForCausalLM", scale_fmt="ue8m0")
    return Package(config, shard_names(2))


def deepseek_v32(b: Builder) -> Package:
    """V3.2: as V3.1, with an indexer."""
    _v3_model(b, SQUARE_POWER, indexer=True)
    config = _v3_config("deepseek_v32", "DeepseekV32ForCausalLM", scale_fmt="ue8m0")
    return Package(config, shard_names(2))


def kimi_k2(b: Builder) -> Package:
    """V3's names in shards that are numbered without padding."""
    _v3_model(b, SQUARE)
    config = _v3_config("kimi_k2", "DeepseekV3ForCausalLM")
    return Package(config, shard_names(11, "model-{}-of-{}.safetensors"))


def glm_5(b: Builder) -> Package:
    """V3.2's names under another model type, float scales of any value."""
    _v3_model(b, SQUARE, indexer=True)
    return Package(_v3_config("glm_moe_dsa", "GlmMoeDsaForCausalLM"), shard_names(2))


def _v3_config(model_type: str, architecture: str, **quantization: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": 2,
        "quantization_config": {**FINE_GRAINED, **quantization},
    }


def _v3_model(b: Builder, style: Style, indexer: bool = False) -> None:
    b.plain("BF16", "model.embed_tokens.weight", VOCAB, HIDDEN)
    for layer in range(3):
        _v3_layer(b, f"model.layers.{layer}.", style, dense=layer == 0, indexer=indexer)
    draft = "model.layers.2."
    b.fp8(draft + "eh_proj", HIDDEN, 2 * HIDDEN, style=style)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        b.plain("BF16", f"{draft}{name}.weight", HIDDEN)
    for name in ("embed_tokens", "shared_head.head"):
        b.plain("BF16", f"{draft}{name}.weight", VOCAB, HIDDEN)
    b.plain("BF16", "model.norm.weight", HIDDEN)
    b.plain("BF16", "lm_head.weight", VOCAB, HIDDEN)


def _v3_layer(b: Builder, prefix: str, style: Style, dense: bool, indexer: bool) -> None:
    fp8 = partial(b.fp8, style=style)
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    fp8(attn + "q_a_proj", 160, HIDDEN)
    fp8(attn + "q_b_proj", 384, 160)
    fp8(attn + "kv_a_proj_with_mqa", 144, HIDDEN)  # 4.5 blocks of rows in the released models, 1.125 here
    fp8(attn + "kv_b_proj", 256, 128)
    fp8(attn + "o_proj", HIDDEN, 256)
    b.plain("BF16", attn + "q_a_layernorm.weight", 160)
    b.plain("BF16", attn + "kv_a_layernorm.weight", 128)
    if indexer:
        fp8(attn + "indexer.wq_b", 256, 160)
        fp8(attn + "indexer.wk", 128, HIDDEN)
        b.plain("F32", attn + "indexer.k_norm.weight", 128)
        b.plain("F32", attn + "indexer.k_norm.bias", 128)
        b.plain("BF16", attn + "indexer.weights_proj.weight", 2, HIDDEN)
    modules = [mlp] if dense else [f"{mlp}experts.0.", f"{mlp}experts.1.", f"{mlp}shared_experts."]
    for module in modules:
        fp8(module + "gate_proj", INNER, HIDDEN)
        fp8(module + "up_proj", INNER, HIDDEN)
        fp8(module + "down_proj", HIDDEN, INNER)
    if not dense:
        b.plain("BF16", mlp + "gate.weight", 2, HIDDEN)
        b.plain("F32", mlp + "gate.e_score_correction_bias", 2)
    b.plain("BF16", prefix + "input_layernorm.weight", HIDDEN)
    b.plain("BF16", prefix + "post_attention_layernorm.weight", HIDDEN)

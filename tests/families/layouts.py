"""Every family's checkpoint by name: `write_layout(name, folder)` writes it and says what is known of it.

Names, dtypes, grids and configs are those of the released checkpoints; shapes are small but keep blocks at the edges.
Weights are quantized by the family's own scheme from normal values with outliers, so that codes above 240 occur.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.families import compressed_tensors, deepseek, fine_grained, modelopt, other_quantizers, variants
from tests.families.builder import Builder, Fp8Weight, Layout, Package

__all__ = ["LAYOUTS", "Fp8Weight", "Layout", "Recipe", "write_layout"]


@dataclass(frozen=True)
class Recipe:
    """A family as people name it, and what writes one of its checkpoints: (folder, seed) -> Layout."""

    family: str
    write: Callable[[Path, int], Layout]


def _packages(module: ModuleType, families: Mapping[str, str]) -> dict[str, Recipe]:
    """Recipes for the functions of a module that fill a Builder, by their names."""
    return {name: Recipe(family, _writer(name, getattr(module, name))) for name, family in families.items()}


def _writer(name: str, fill: Callable[[Builder], Package]) -> Callable[[Path, int], Layout]:
    def write(folder: Path, seed: int) -> Layout:
        builder = Builder(name, seed)
        return builder.finish(folder, fill(builder))

    return write


LAYOUTS: Mapping[str, Recipe] = {
    "deepseek_v41": Recipe("DeepSeek-V4.1", deepseek.deepseek_v41),
    **_packages(
        deepseek,
        {
            "deepseek_v4": "DeepSeek-V4",
            "deepseek_v4_fp8_experts": "DeepSeek-V4 fp8 repack",
            "deepseek_v4_transformers": "DeepSeek-V4, transformers' names",
            "deepseek_v3": "DeepSeek-V3 / R1",
            "deepseek_v31": "DeepSeek-V3.1",
            "deepseek_v32": "DeepSeek-V3.2",
            "kimi_k2": "Kimi-K2",
            "glm_5": "GLM-5",
        },
    ),
    **_packages(
        fine_grained,
        {
            "qwen3": "Qwen3",
            "qwen3_f16": "Qwen3, F16 scales",
            "qwen3_moe": "Qwen3 MoE",
            "qwen38_ngram": "Qwen3.8",
            "qwen38_ngram_scalar": "Qwen3.8, scalar scale",
            "qwen38_ngram_rows": "Qwen3.8, scale by row",
            "mimo_v2_flash": "MiMo-V2-Flash",
            "mimo_v25_pro": "MiMo-V2.5-Pro",
            "mimo_v25": "MiMo-V2.5",
            "minimax_m2": "MiniMax-M2",
            "minimax_m3": "MiniMax-M3",
            "mistral_hf": "Mistral",
            "mistral_hf_experts": "Mistral, stacked experts",
            "stacked_block_experts": "stacked experts in blocks",
        },
    ),
    **_packages(
        compressed_tensors,
        {
            "llama_channel": "compressed-tensors, channel",
            "llama_tensor_static": "compressed-tensors, tensor, static",
            "llama_block": "compressed-tensors, block",
            "llama_mxfp8": "compressed-tensors, MXFP8",
            "llama_nvfp4": "compressed-tensors, NVFP4",
            "glm_45": "GLM-4.5",
            "kimi_k2_thinking": "Kimi-K2-Thinking",
            "kimi_k3": "Kimi-K3",
        },
    ),
    **_packages(
        modelopt,
        {
            "modelopt_fp8": "ModelOpt FP8",
            "modelopt_fp8_channel": "ModelOpt FP8, channel",
            "modelopt_fp8_block": "ModelOpt FP8, block",
            "modelopt_nvfp4": "ModelOpt NVFP4",
            "modelopt_mixed": "ModelOpt, mixed",
        },
    ),
    **_packages(
        other_quantizers,
        {
            "gpt_oss": "gpt-oss",
            "mistral_native": "Mistral, own format",
            "fbgemm": "FBGEMM",
            "autofp8": "AutoFP8",
            "autofp8_old": "AutoFP8, first version",
            "quark": "Quark",
            "torchao": "torchao",
            "diffusion_scaled": "ComfyUI, scaled",
            "diffusion_comfy_quant": "ComfyUI, comfy_quant",
            "diffusion_cast": "diffusion, plain cast",
            "diffusion_cast_large": "diffusion, plain cast above 240",
            "diffusion_e5m2": "diffusion, e5m2",
            "transformer_engine": "Transformer Engine",
        },
    ),
    **_packages(
        variants,
        {
            "deepseek_inference": "DeepSeek-V3, its inference code's names",
            "deepseek_v4_transformers_fp4": "DeepSeek-V4, transformers' names, fp4 experts",
            "fused_experts": "fused experts of serving engines",
            "minimax_m3_released": "MiniMax-M3, released config",
            "modelopt_mxfp8": "ModelOpt MXFP8",
            "compressed_groups": "compressed-tensors, several schemes",
            "quark_layers": "Quark, several schemes",
            "autofp8_cache": "AutoFP8, scales of the cache",
            "mistral_native_cache": "Mistral, own format, scales of the cache",
            "torchao_mx": "torchao, MX",
            "tensor_powers": "powers of two by tensor and by row",
            "mixed_names": "several families in one checkpoint",
            "tensorrt_llm": "TensorRT-LLM",
            "quark_blocks": "Quark, blocks",
            "autoround_mxfp8": "auto-round, MXFP8",
            "modelopt_experts": "ModelOpt, stacked experts",
            "thinker": "a config under a wrapper",
        },
    ),
}


def write_layout(name: str, folder: Path, seed: int = 0) -> Layout:
    """Write the named family's checkpoint into `folder`: the same bytes for the same seed."""
    return LAYOUTS[name].write(folder, seed)

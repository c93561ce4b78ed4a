"""The files beside the shards: config.json as the released one is built, and small stand-ins for the rest."""

from __future__ import annotations

import json
from typing import Any

from .dims import ModelDims

MARKER = "# Sample DeepSeek-V4.1 checkpoint"
"""First line of the README; a folder without it is never overwritten."""


def extra_files(dims: ModelDims, seed: int) -> dict[str, str]:
    """Text of every file besides the shards and their index, by path within the checkpoint."""
    return {
        "README.md": f"{MARKER}\n\nPseudo-random weights (seed {seed}) in the layout of DeepSeek-V4.1-Flash.\n",
        "config.json": _json(config(dims)),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json({"model_max_length": 1048576, "tokenizer_class": "PreTrainedTokenizerFast"}),
        "inference/config.json": _json({"dim": dims.hidden, "n_layers": dims.layers, "vocab_size": dims.vocab}),
        "encoding/encoding.py": '"""Stand-in for the prompt encoder."""\n\nBOS, EOS = 0, 1\n',
    }


def config(dims: ModelDims) -> dict[str, Any]:
    """config.json: quantization at the top level (no `fmt`), the language model and the vision tower nested."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": dims.vocab - 16,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": _attention_config(dims) | _moe_config(dims) | _engram_config(dims) | _draft_config(dims),
        "vision_config": _vision_config(dims),
    }


def _attention_config(dims: ModelDims) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41_text",
        "vocab_size": dims.vocab,
        "tie_word_embeddings": False,
        "hidden_size": dims.hidden,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": 1,
        "head_dim": dims.head_dim,
        "qk_rope_head_dim": min(64, dims.head_dim // 2),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "q_lora_rank": dims.q_lora,
        "o_lora_rank": dims.o_lora,
        "o_groups": dims.o_groups,
        "rms_norm_eps": 1e-20,
        "sliding_window": 128,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "compress_ratios": dims.compress_ratios,
        "kv_source_layer_ids": dims.kv_sources,
        "index_source_layer_ids": dims.index_sources,
        "index_n_heads": dims.index_heads,
        "index_head_dim": dims.index_dim,
        "index_topk": 512,
        "candidate_source_layer_id": dims.decoder_start,
        "candidate_block_size": 64,
        "candidate_topk_blocks": 128,
        "hc_mult": dims.streams,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
    }


def _moe_config(dims: ModelDims) -> dict[str, Any]:
    return {
        "moe_intermediate_size": dims.expert_inner,
        "n_routed_experts": dims.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": min(6, dims.experts),
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
    }


def _engram_config(dims: ModelDims) -> dict[str, Any]:
    return {
        "engram_layer_ids": dims.engram_layers,
        "engram_num_embeddings": dims.engram_rows,
        "engram_vocab_size": dims.vocab,
        "engram_max_ngram_size": dims.engram_ngram,
        "engram_n_heads": dims.engram_heads,
        "engram_head_dim": dims.engram_dim,
        "engram_pad_token_id": 2,
    }


def _draft_config(dims: ModelDims) -> dict[str, Any]:
    return {
        "num_nextn_predict_layers": dims.draft_stages,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": dims.draft_targets,
        "dspark_noise_token_id": dims.vocab - 1,
        "dspark_markov_rank": dims.markov_rank,
        "dspark_n_routed_experts": dims.draft_experts,
        "dspark_num_experts_per_tok": min(3, dims.draft_experts),
    }


def _vision_config(dims: ModelDims) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": dims.vision_layers,
        "hidden_size": dims.vision_dim,
        "num_attention_heads": max(1, dims.vision_dim // 64),
        "intermediate_size": dims.vision_inner,
        "patch_size": dims.patch,
        "rope_theta": 10000,
        "downsample_ratio": dims.downsample,
    }


def _tokenizer() -> dict[str, Any]:
    vocab = {"<bos>": 0, "<eos>": 1, "<pad>": 2, "a": 3, "b": 4}
    return {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"

"""The linear layers of a small Llama, which most quantizers' checkpoints are made of."""

from __future__ import annotations

from tests.families.builder import Builder, Style
from tests.families.deepseek import HIDDEN, INNER, VOCAB

PROJECTIONS = (
    ("self_attn.q_proj", 320, HIDDEN),
    ("self_attn.k_proj", 64, HIDDEN),
    ("self_attn.v_proj", 64, HIDDEN),
    ("self_attn.o_proj", HIDDEN, 320),
    ("mlp.gate_proj", INNER, HIDDEN),
    ("mlp.up_proj", INNER, HIDDEN),
    ("mlp.down_proj", HIDDEN, INNER),
)


def llama(b: Builder, style: Style, static: str = "", cache: bool = False) -> None:
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

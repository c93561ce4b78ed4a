"""transformers' fine-grained fp8: `x.weight` with `x.weight_scale_inv`, which multiplies for all its name.

DeepSeek-V3, R1, V3.1, V3.2, Kimi-K2, GLM-5, Qwen3 to 3.8, MiniMax, MiMo, Mistral, and V4 as transformers
renames it. Scales are F32, BF16, F16, e8m0, or e8m0 in U8 where the config says so; blocks are the config's
`weight_block_size`, or null for one scale a tensor. Stacked experts: `experts.down_proj` with
`experts.down_proj_scale_inv`. I8 weights with an e8m0 scale are fp4, two values a byte, 1x32.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_prep.families.block_size import fits
from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import QuantizedWeight

_NAME = "fine-grained-fp8"
_FP4_BLOCK = (1, 32)


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise weights by `weight_scale_inv`; the config only tells block sizes and what U8 scales mean."""
    pairs = pair_weights(checkpoint, quantization, lambda name: appended(name, "_scale_inv"))
    weights = (*pairs.weights, *_fp4_weights(checkpoint))
    return Layout(_NAME, weights, pairs.unpaired) if weights or pairs.unpaired else None


def _fp4_weights(checkpoint: Checkpoint) -> Iterator[QuantizedWeight]:
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype == "I8":
            for scale in (checkpoint.tensors.get(found) for found in appended(name, "_scale_inv")):
                if scale is not None and scale.dtype == "F8_E8M0" and fits(tensor, scale, "e2m1", _FP4_BLOCK):
                    yield QuantizedWeight(name, scale.name, "e2m1", _FP4_BLOCK)

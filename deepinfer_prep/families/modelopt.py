"""ModelOpt (TensorRT Model Optimizer): `x.weight` with `x.weight_scale`, or `x.weight_scale_inv` for blocks.

`quant_algo`, in config.json or in hf_quant_config.json, says how scales lie: FP8 (one value), FP8_PB_WO and
FP8_BLOCK_SCALES (128x128 blocks, the scale [n/128, k/128] or [n/128, 1, k/128, 1]), FP8_PER_CHANNEL_PER_TOKEN (one a
row), MXFP8 (e8m0 exponents as U8, 1x32). Under MIXED_PRECISION `quantized_layers` says it module by module.
"""

from __future__ import annotations

from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "modelopt"


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise a checkpoint by `quant_method: modelopt` or by a `quant_algo`, which hf_quant_config.json has."""
    if not quantization.has_method(_NAME) and not quantization.has_key("quant_algo"):
        return None
    pairs = pair_weights(checkpoint, quantization, lambda name: appended(name, "_scale", "_scale_inv"))
    return Layout(_NAME, pairs.weights, pairs.unpaired)

"""FBGEMM (Llama-3.1-405B-FP8): `x.weight` with `x.weight_scale`, one float a row.

`input_scale_ub` and the config's `activation_scale_ub` are upper bounds of scales that are computed while serving; they
are no scales and stay as they are.
"""

from __future__ import annotations

from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "fbgemm"


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise a checkpoint by its config's `quant_method`: the tensor names occur in other families as well."""
    if not quantization.has_method("fbgemm_fp8"):
        return None
    pairs = pair_weights(checkpoint, quantization, lambda name: appended(name, "_scale"))
    return Layout(_NAME, pairs.weights, pairs.unpaired)

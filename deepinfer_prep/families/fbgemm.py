"""FBGEMM (Llama-3.1-405B-FP8): `x.weight` with `x.weight_scale`, one float a row.

`input_scale_ub` and the config's `activation_scale_ub` are upper bounds of scales that are computed while
serving; they are no scales and stay as they are.
"""

from __future__ import annotations

from deepinfer_prep.families.block_size import Blocks, not_a_matrix, per_row
from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo

_NAME = "fbgemm"


def layout(checkpoint: Checkpoint) -> Layout | None:
    """Recognise a checkpoint by its config's `quant_method`: the tensor names occur in other families as well."""
    if checkpoint.quantization.get("quant_method") != "fbgemm_fp8":
        return None
    pairs = pair_weights(checkpoint, lambda name: appended(name, "_scale"), _blocks, has_exponents=lambda _: False)
    return Layout(_NAME, pairs.weights, pairs.unpaired)


def _blocks(weight: TensorInfo, scale: TensorInfo) -> Blocks:
    if len(weight.shape) < 2:
        return not_a_matrix(weight)
    unlike = f"the format has one scale a row, but the scale has the shape {list(scale.shape)}"
    return per_row(weight, scale) or Blocks(None, unlike)

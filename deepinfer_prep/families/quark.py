"""Quark (AMD): `x.weight` with `x.weight_scale`; the config says per tensor, per channel, per group or per block.

`global_quant_config.weight` is the rule and `layer_quant_config` holds exceptions by name pattern (shell-style); each
`weight` states `dtype`, `qscheme`, `ch_axis`, `group_size` or `block_size`, and `scale_format`.
"""

from __future__ import annotations

from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "quark"


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise a checkpoint by its config's `quant_method`: the tensor names occur in other families as well."""
    if not quantization.has_method(_NAME):
        return None
    pairs = pair_weights(checkpoint, quantization, lambda name: appended(name, "_scale"))
    return Layout(_NAME, pairs.weights, pairs.unpaired)

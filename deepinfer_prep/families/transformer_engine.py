"""Transformer Engine: the scale of an fp8 weight lies inside the opaque `_extra_state` of its module.

In there `scale` divides and `scale_inv` multiplies; nothing outside of Transformer Engine can read them.
"""

from __future__ import annotations

from deepinfer_prep.families.pairing import beside
from deepinfer_prep.families.protocol import Layout, Unpaired, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "transformer-engine"
_OPAQUE = Unpaired(
    "have their scale inside Transformer Engine's opaque `_extra_state`",
    "It cannot be read without that library. Export the model from there in bf16, or in fp8 with `weight_scale_inv`.",
)


def layout(checkpoint: Checkpoint, _: Quantization) -> Layout | None:
    """Recognise weights by a tensor `_extra_state` in the same module."""
    names = [name for name in fp8_names(checkpoint) if beside(name, "_extra_state") in checkpoint.tensors]
    return Layout(_NAME, unpaired=dict.fromkeys(names, _OPAQUE)) if names else None

"""`x.weight` with `x.weight_scale`, which multiplies, where no config names a family: AutoFP8 and many repacks."""

from __future__ import annotations

from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "weight-scale"


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise weights by `weight_scale`; families whose config says more are asked first."""
    pairs = pair_weights(checkpoint, quantization, lambda name: appended(name, "_scale"))
    return Layout(_NAME, pairs.weights, pairs.unpaired) if any(pairs) else None

"""`x.weight` with `x.weight_scale`, which multiplies, where no config names a family: AutoFP8 and many repacks."""

from __future__ import annotations

from deepinfer_prep.families.block_size import known_blocks
from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import stated_block, states_exponents
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "weight-scale"


def layout(checkpoint: Checkpoint) -> Layout | None:
    """Recognise weights by `weight_scale`; families whose config says more are asked first."""
    stated, is_exponent = stated_block(checkpoint.quantization), states_exponents(checkpoint.quantization)
    pairs = pair_weights(
        checkpoint,
        lambda name: appended(name, "_scale"),
        lambda weight, scale: known_blocks(weight, scale, stated),
        has_exponents=lambda _: is_exponent,
    )
    return Layout(_NAME, pairs.weights, pairs.unpaired) if any(pairs) else None

"""`x.weight` with `x.weight_scale`, which multiplies, where no config names a family: AutoFP8 and many repacks."""

from __future__ import annotations

from deepinfer_prep.families.block_size import known_blocks
from deepinfer_prep.families.names import appended
from deepinfer_prep.families.pairing import pair_weights
from deepinfer_prep.families.protocol import Family, Layout
from deepinfer_prep.families.quantization_config import stated_block, states_exponents
from deepinfer_prep.files.checkpoint import Checkpoint


class WeightScale:
    """The name that most quantizers write."""

    name = "weight-scale"

    def layout(self, checkpoint: Checkpoint) -> Layout | None:
        """`weight_scale` beside an fp8 weight; families whose config says more are asked before."""
        stated, is_exponent = stated_block(checkpoint.quantization), states_exponents(checkpoint.quantization)
        pairs = pair_weights(
            checkpoint,
            lambda name: appended(name, "_scale"),
            lambda weight, scale: known_blocks(weight, scale, stated),
            has_exponents=lambda _: is_exponent,
        )
        return Layout(self.name, pairs.weights, pairs.unpaired) if any(pairs) else None


FAMILY: Family = WeightScale()

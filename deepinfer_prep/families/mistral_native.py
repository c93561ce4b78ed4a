"""Mistral's own format (consolidated.safetensors, params.json): `x.weight` with `x.qscale_weight`."""

from __future__ import annotations

from deepinfer_prep.families.block_size import known_blocks
from deepinfer_prep.families.names import beside
from deepinfer_prep.families.pairing import pair_weights
from deepinfer_prep.families.protocol import Family, Layout
from deepinfer_prep.files.checkpoint import Checkpoint


class MistralNative:
    """Checkpoints as Mistral publishes them beside the transformers form."""

    name = "mistral"

    def layout(self, checkpoint: Checkpoint) -> Layout | None:
        """`qscale_weight` is enough: no other family has it."""
        pairs = pair_weights(
            checkpoint,
            _scale_name,
            lambda weight, scale: known_blocks(weight, scale, None),
            has_exponents=lambda _: False,
        )
        return Layout(self.name, pairs.weights, pairs.unpaired) if any(pairs) else None


def _scale_name(name: str) -> str | None:
    return beside(name, "qscale_weight") if name.rpartition(".")[2] == "weight" else None


FAMILY: Family = MistralNative()

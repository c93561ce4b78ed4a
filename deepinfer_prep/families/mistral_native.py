"""Mistral's own format (consolidated.safetensors, params.json): `x.weight` with `x.qscale_weight`."""

from __future__ import annotations

from deepinfer_prep.families.block_size import known_blocks
from deepinfer_prep.families.pairing import beside, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "mistral"


def layout(checkpoint: Checkpoint) -> Layout | None:
    """Recognise weights by `qscale_weight`: no other family has it."""
    pairs = pair_weights(
        checkpoint,
        _scale_name,
        lambda weight, scale: known_blocks(weight, scale, None),
        has_exponents=lambda _: False,
    )
    return Layout(_NAME, pairs.weights, pairs.unpaired) if any(pairs) else None


def _scale_name(name: str) -> str | None:
    return beside(name, "qscale_weight") if name.rpartition(".")[2] == "weight" else None

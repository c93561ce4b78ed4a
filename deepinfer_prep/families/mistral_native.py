"""Mistral's own format (consolidated.safetensors, params.json): `x.weight` with `x.qscale_weight`."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_prep.families.pairing import beside, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "mistral"


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise weights by `qscale_weight`: no other family has it."""
    pairs = pair_weights(checkpoint, quantization, _scale_names)
    return Layout(_NAME, pairs.weights, pairs.unpaired) if any(pairs) else None


def _scale_names(name: str) -> Iterator[str]:
    if name.rpartition(".")[2] == "weight":
        yield beside(name, "qscale_weight")

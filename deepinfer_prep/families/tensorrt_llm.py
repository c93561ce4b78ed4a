"""TensorRT-LLM's own checkpoints: `x.weight` with `x.weights_scaling_factor`, one value that multiplies."""

from __future__ import annotations

from deepinfer_prep.families.pairing import beside, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "tensorrt-llm"


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise weights by `weights_scaling_factor`: no other family has it."""
    pairs = pair_weights(checkpoint, quantization, lambda name: [beside(name, "weights_scaling_factor")])
    return Layout(_NAME, pairs.weights, pairs.unpaired) if any(pairs) else None

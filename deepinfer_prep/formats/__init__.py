"""How each checkpoint family pairs a weight with its scale; one small file a family."""

from __future__ import annotations

from deepinfer_prep.checkpoint import Checkpoint
from deepinfer_prep.formats.base import Family, Layout, QuantizedWeight
from deepinfer_prep.formats.compressed_tensors import CompressedTensors
from deepinfer_prep.formats.deepseek_v4 import DeepSeekV4

__all__ = ["FAMILIES", "Family", "Layout", "QuantizedWeight", "read_layout"]

FAMILIES: tuple[Family, ...] = (CompressedTensors(), DeepSeekV4())
"""In the order in which they are asked: what the config states before what only names suggest."""

UNKNOWN = "unknown"


def read_layout(checkpoint: Checkpoint) -> Layout:
    """The layout by the first family that recognises the checkpoint; one without weights where none does."""
    for family in FAMILIES:
        if family.recognises(checkpoint):
            return family.layout(checkpoint)
    return Layout(UNKNOWN, ())

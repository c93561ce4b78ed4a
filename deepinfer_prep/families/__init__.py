"""How each checkpoint family pairs a weight with its scale; one small file a family.

A new family is a module with a function `layout(checkpoint)` of the form `protocol.Family`, and a row in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_prep.families import (
    comfyui,
    compressed_tensors,
    copied_as_is,
    deepseek_inference,
    deepseek_v4,
    fbgemm,
    fine_grained,
    mistral_native,
    modelopt,
    nvfp4,
    quark,
    shared_tables,
    torchao,
    transformer_engine,
    weight_scale,
)
from deepinfer_prep.families.combine import combine
from deepinfer_prep.families.protocol import Family, Layout
from deepinfer_prep.families.user_map import map_scales
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import QuantizedWeight

__all__ = ["FAMILIES", "Family", "Layout", "QuantizedWeight", "read_layout"]

FAMILIES: tuple[Family, ...] = (
    torchao.layout,
    compressed_tensors.layout,
    modelopt.layout,
    quark.layout,
    fbgemm.layout,
    mistral_native.layout,
    comfyui.layout,
    deepseek_v4.layout,
    deepseek_inference.layout,
    fine_grained.layout,
    shared_tables.layout,
    weight_scale.layout,
    nvfp4.layout,
    copied_as_is.mxfp4_layout,
    transformer_engine.layout,
    copied_as_is.e5m2_layout,
)
"""In the order in which they are asked: where two pair a weight with one scale, the first one's block counts.
Families that a config names stand before those that only tensor names show."""


def read_layout(checkpoint: Checkpoint, maps: Iterable[str] = ()) -> Layout:
    """The layout of a checkpoint: what `maps` (--map) pairs, then what the families find.

    Raises:
        ValueError: a map is not of the form WEIGHT=SCALE.
    """
    found = (layout(checkpoint) for layout in FAMILIES)
    return combine(checkpoint, map_scales(checkpoint, maps), [layout for layout in found if layout is not None])

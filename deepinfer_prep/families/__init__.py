"""How each checkpoint family pairs a weight with its scale; one small file a family.

A new family is a module with a `FAMILY` that fulfils `formats.base.Family`, and its name in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from deepinfer_prep.families.combine import merge
from deepinfer_prep.families.protocol import Family, Layout
from deepinfer_prep.families.user_map import map_scales
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import QuantizedWeight

__all__ = ["FAMILIES", "Family", "Layout", "QuantizedWeight", "read_layout"]

_MODULES = (
    "torchao",
    "compressed_tensors",
    "modelopt",
    "quark",
    "fbgemm",
    "mistral_native",
    "comfyui",
    "deepseek_v4",
    "deepseek_inference",
    "fine_grained",
    "shared_tables",
    "weight_scale",
    "nvfp4",
    "mxfp4",
    "transformer_engine",
    "e5m2",
)

FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__name__}.{module}").FAMILY for module in _MODULES)
"""In the order in which they are asked: where two pair a weight with one scale, the first one's block counts.
Families that a config names stand before those that only tensor names show."""


def read_layout(checkpoint: Checkpoint, maps: Iterable[str] = ()) -> Layout:
    """The layout of a checkpoint: what `maps` (--map) pairs, then what the families find.

    Raises:
        ValueError: a map is not of the form WEIGHT=SCALE.
    """
    found = (family.layout(checkpoint) for family in FAMILIES)
    return merge(checkpoint, map_scales(checkpoint, maps), [layout for layout in found if layout is not None])

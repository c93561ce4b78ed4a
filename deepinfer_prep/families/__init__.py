"""How each checkpoint family pairs a weight with its scale; one small file a family.

A new family is a module with a function `layout(checkpoint, quantization)` of the form `protocol.Family`, and a row in
`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from deepinfer_prep.errors import list_some
from deepinfer_prep.families import (
    comfyui,
    compressed_tensors,
    copied_as_is,
    deepseek_inference,
    deepseek_v4,
    fbgemm,
    fine_grained,
    fp8_as_bytes,
    mistral_native,
    modelopt,
    nvfp4,
    quark,
    shared_tables,
    tensorrt_llm,
    torchao,
    transformer_engine,
    weight_scale,
)
from deepinfer_prep.families.combine import combine
from deepinfer_prep.families.protocol import Family, Layout
from deepinfer_prep.families.quantization_config import Conflict, Quantization
from deepinfer_prep.families.user_map import map_scales, state_blocks
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
    tensorrt_llm.layout,
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
    fp8_as_bytes.layout,
)
"""In the order in which they are asked: where two pair a weight with one scale, the first one's block counts.
Families that a config names stand before those that only tensor names show."""


def read_layout(checkpoint: Checkpoint, maps: Iterable[str] = (), blocks: Iterable[str] = ()) -> Layout:
    """The layout of a checkpoint: what `maps` (--map) pairs, then what the families find, in blocks as stated.

    Raises:
        ValueError: a map is not of the form WEIGHT=SCALE, or a block (--block) not of WEIGHT=ROWSxCOLUMNS.
    """
    quantization = Quantization(checkpoint)
    found = (layout(checkpoint, quantization) for layout in FAMILIES)
    mapped = map_scales(checkpoint, quantization, maps)
    layout = combine(checkpoint, quantization, mapped, [layout for layout in found if layout is not None])
    layout = state_blocks(checkpoint, layout, blocks)
    return replace(layout, refusals=(*layout.refusals, *_contradictions(checkpoint, quantization, layout)))


def _contradictions(checkpoint: Checkpoint, quantization: Quantization, layout: Layout) -> Iterator[str]:
    """A sentence for each two configs that state different blocks of weights for which the user stated none."""
    undecided: dict[Conflict, list[str]] = {}
    for weight in layout.weights:
        if weight.block is None and weight.weight in quantization.conflicts:
            undecided.setdefault(quantization.conflicts[weight.weight], []).append(weight.weight)
    for conflict, names in undecided.items():
        one, other = (f"{rows}x{columns}" for rows, columns in conflict.blocks)
        yield (
            f"{checkpoint.root}: {conflict.configs[0]} states blocks of {one} and {conflict.configs[1]} of {other} for "
            f"the same {len(names):,} weights, {list_some(names, 3, repr)}, and both give the grids of their scales. "
            f"Remove the config that is wrong, or say which blocks are meant with --block '{names[0]}={one}'; * stands "
            "for any characters."
        )

"""DeepSeek-V4 and V4.1: `x.weight` with `x.scale` in e8m0, fp4 experts as I8.

Two block sizes occur in this format: 128x128 in V4 and 32x32 in V4.1, both stated in the config's
`weight_block_size`. A scale with as many rows as its weight is per row: fp4 experts and V4.1's engram tables.
"""

from __future__ import annotations

from deepinfer_prep.checkpoint import Checkpoint
from deepinfer_prep.formats.base import (
    Element,
    Layout,
    QuantizedWeight,
    config_block,
    fits,
    grid_problem,
    sibling,
)

_ELEMENTS: dict[str, Element] = {"F8_E4M3": "e4m3", "I8": "e2m1"}
_FORMAT_BLOCKS = ((32, 32), (128, 128))
_ROW_BLOCK = (1, 32)


class DeepSeekV4:
    """DeepSeek-V4 and V4.1 as DeepSeek publishes them."""

    name = "deepseek-v4"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """An e8m0 `.scale` beside an fp8 or fp4 `.weight` is enough: no other family has it."""
        return any(_scale_of(checkpoint, name) is not None for name in checkpoint.tensors)

    def layout(self, checkpoint: Checkpoint) -> Layout:
        """Pair by name and header dtype; the config is asked for block sizes only."""
        stated = config_block(checkpoint)
        weights = []
        for name in checkpoint.tensors:
            scale = _scale_of(checkpoint, name)
            if scale is not None:
                weights.append(_quantized_weight(checkpoint, name, scale, stated))
        return Layout(self.name, tuple(weights))


def _scale_of(checkpoint: Checkpoint, name: str) -> str | None:
    tensor = checkpoint.tensors[name]
    if tensor.dtype not in _ELEMENTS or name.rpartition(".")[2] != "weight" or len(tensor.shape) < 2:
        return None
    scale = checkpoint.tensors.get(sibling(name, "scale"))
    return scale.name if scale is not None and scale.dtype == "F8_E8M0" else None


def _quantized_weight(
    checkpoint: Checkpoint, name: str, scale_name: str, stated: tuple[int, int] | None
) -> QuantizedWeight:
    weight, scale = checkpoint.tensors[name], checkpoint.tensors[scale_name]
    element = _ELEMENTS[weight.dtype]
    if element == "e2m1" or fits(weight, scale, element, _ROW_BLOCK):
        candidates: tuple[tuple[int, int], ...] = (_ROW_BLOCK,)
    else:
        candidates = (stated,) if stated is not None else _FORMAT_BLOCKS
    block = next((block for block in candidates if fits(weight, scale, element, block)), None)
    return QuantizedWeight(
        name,
        scale_name,
        element,
        block,
        block_problem="" if block else grid_problem(weight, scale, element, candidates[0]),
        no_kernel_scale="it is a look-up table, not the operand of a GEMM"
        if name.endswith("engram.embed.weight")
        else "",
    )

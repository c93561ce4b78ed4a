"""What DeepSeek's own inference/convert.py makes of V3: `x.weight` with a float `x.scale` of 128x128 blocks.

A float `scale` multiplies here, and divides in Transformer Engine. It is taken only where its two axes are the
grid of the stated blocks, or of the format's 128x128, which a dividing per-tensor scale never is.
"""

from __future__ import annotations

from deepinfer_prep.families.block_size import fits
from deepinfer_prep.families.pairing import beside
from deepinfer_prep.families.protocol import Layout, Unpaired, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.families.schemes import Block
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import FLOAT_DTYPES, QuantizedWeight

_NAME = "deepseek-inference"
_FORMAT_BLOCK = (128, 128)

_MAY_DIVIDE = Unpaired(
    "have a float tensor `scale` beside them that may multiply or divide",
    "It multiplies in DeepSeek's files, where it is a grid of blocks, and divides in Transformer Engine; nothing here "
    "tells which. If it multiplies, say so with --map '*.weight=*.scale'.",
)


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise weights by a float tensor `x.scale` beside the fp8 tensor `x.weight`."""
    weights: list[QuantizedWeight] = []
    unpaired: dict[str, Unpaired] = {}
    for name in fp8_names(checkpoint):
        scale = checkpoint.tensors.get(beside(name, "scale"))
        if name.rpartition(".")[2] != "weight" or scale is None or scale.dtype not in FLOAT_DTYPES:
            continue
        candidates = quantization.stated_blocks(name) or [_FORMAT_BLOCK]
        block = next((block for block in candidates if _is_grid(checkpoint.tensors[name], scale, block)), None)
        if block is not None:
            weights.append(QuantizedWeight(name, scale.name, "e4m3", block))
        else:
            unpaired[name] = _MAY_DIVIDE
    return Layout(_NAME, tuple(weights), unpaired) if weights or unpaired else None


def _is_grid(weight: TensorInfo, scale: TensorInfo, block: Block) -> bool:
    return len(weight.shape) == 2 == len(scale.shape) and fits(weight, scale, "e4m3", block)

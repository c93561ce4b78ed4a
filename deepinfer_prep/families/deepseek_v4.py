"""DeepSeek-V4 and V4.1: `x.weight` with `x.scale` in e8m0, fp4 experts as I8.

Two block sizes occur in this format: 128x128 in V4 and 32x32 in V4.1, both stated in the config's
`weight_block_size`. A scale with as many rows as its weight is per row: fp4 experts and V4.1's engram tables.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_prep.families.block_size import fits, grid_problem
from deepinfer_prep.families.pairing import beside
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import Element, QuantizedWeight

_NAME = "deepseek-v4"
_ELEMENTS: dict[str, Element] = {"F8_E4M3": "e4m3", "I8": "e2m1"}
_FORMAT_BLOCKS = [(32, 32), (128, 128)]
_ROW_BLOCK = (1, 32)


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise weights by an e8m0 tensor `x.scale` beside `x.weight` in fp8 or fp4: no other family has it."""
    weights = tuple(_weight(weight, scale, quantization) for weight, scale in _pairs(checkpoint))
    return Layout(_NAME, weights) if weights else None


def _pairs(checkpoint: Checkpoint) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype in _ELEMENTS and name.rpartition(".")[2] == "weight":
            scale = checkpoint.tensors.get(beside(name, "scale"))
            if scale is not None and scale.dtype == "F8_E8M0":
                yield tensor, scale


def _weight(weight: TensorInfo, scale: TensorInfo, quantization: Quantization) -> QuantizedWeight:
    element = _ELEMENTS[weight.dtype]
    if element == "e2m1" or fits(weight, scale, element, _ROW_BLOCK):
        candidates = [_ROW_BLOCK]
    else:
        candidates = quantization.stated_blocks(weight.name) or _FORMAT_BLOCKS
    block = next((block for block in candidates if fits(weight, scale, element, block)), None)
    problem = "" if block else grid_problem(weight, scale, element, candidates[0])
    is_table = weight.name.endswith("engram.embed.weight")
    reason = "it is a look-up table, not the operand of a GEMM" if is_table else ""
    return QuantizedWeight(weight.name, scale.name, element, block, problem, reason)

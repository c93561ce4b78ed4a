"""NVFP4, by ModelOpt or compressed-tensors: packed fp4 in U8 whose block scales are F8_E4M3 themselves, up to 448.

The fp8 tensor is a scale and not a weight: it has no scale of its own that could be doubled for it.
"""

from __future__ import annotations

from deepinfer_prep.families.pairing import beside
from deepinfer_prep.families.protocol import Layout, Unpaired, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "nvfp4"
_IS_SCALE = Unpaired(
    "are block scales of packed 4-bit weights (NVFP4), not weights",
    "Halving them would be wrong, and Trainium2 has no kernel for this format. Use an fp8 or bf16 checkpoint of the "
    "model instead.",
)


def layout(checkpoint: Checkpoint, _: Quantization) -> Layout | None:
    """Recognise block scales: an F8_E4M3 `weight_scale` beside a U8 `weight` or `weight_packed`."""
    scales = {name: _IS_SCALE for name in fp8_names(checkpoint) if _is_scale(checkpoint, name)}
    return Layout(_NAME, unpaired=scales) if scales else None


def _is_scale(checkpoint: Checkpoint, name: str) -> bool:
    if name.rpartition(".")[2] != "weight_scale":
        return False
    packed = (checkpoint.tensors.get(beside(name, last)) for last in ("weight", "weight_packed"))
    return any(tensor is not None and tensor.dtype == "U8" for tensor in packed)

"""ComfyUI's diffusion checkpoints: `x.weight` with `x.scale_weight`, or in the newer form `x.weight_scale`.

The older form has an F8_E4M3 tensor `scaled_fp8` of at most two elements whose dtype and length mean something
and whose values do not. The newer form has JSON beside each quantized weight, as a U8 tensor `x.comfy_quant`.
Plain casts without any scale belong to no family and are refused as unscaled.
"""

from __future__ import annotations

from deepinfer_prep.families.block_size import known_blocks
from deepinfer_prep.families.pairing import beside, pair_weights
from deepinfer_prep.families.protocol import Layout, fp8_names
from deepinfer_prep.files.checkpoint import Checkpoint

_NAME = "comfyui"
_MARKER, _MARKER_ELEMENTS = "scaled_fp8", 2


def layout(checkpoint: Checkpoint) -> Layout | None:
    """Recognise a checkpoint by `scale_weight`, `comfy_quant` or the marker: no other family has them."""
    pairs = pair_weights(
        checkpoint,
        lambda name: _scale_name(checkpoint, name),
        lambda weight, scale: known_blocks(weight, scale, None),
        has_exponents=lambda _: False,
    )
    markers = tuple(name for name in fp8_names(checkpoint) if _is_marker(checkpoint, name))
    return Layout(_NAME, pairs.weights, pairs.unpaired, markers) if any(pairs) or markers else None


def _scale_name(checkpoint: Checkpoint, name: str) -> str | None:
    if name.rpartition(".")[2] != "weight":
        return None
    newer = beside(name, "comfy_quant") in checkpoint.tensors
    return beside(name, "weight_scale" if newer else "scale_weight")


def _is_marker(checkpoint: Checkpoint, name: str) -> bool:
    return name.rpartition(".")[2] == _MARKER and checkpoint.tensors[name].elements <= _MARKER_ELEMENTS

"""ComfyUI's diffusion checkpoints: `x.weight` with `x.scale_weight`, or in the newer form `x.weight_scale`.

The older form has an F8_E4M3 tensor `scaled_fp8` of at most two elements whose dtype and length mean something and
whose values do not. The newer form says the format of each quantized weight in JSON: in a U8 tensor `x.comfy_quant`, or
under `_quantization_metadata` in the header. Plain casts without any scale belong to no family and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deepinfer_prep.families.pairing import beside, pair_weights
from deepinfer_prep.families.protocol import Layout, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.families.schemes import states_exponents
from deepinfer_prep.files.checkpoint import Checkpoint, read_small_tensor
from deepinfer_prep.files.untrusted import CONFIG, JsonError, parse_object
from deepinfer_prep.quantized import QuantizedWeight

_NAME = "comfyui"
_MARKER, _MARKER_ELEMENTS = "scaled_fp8", 2
_SWIZZLED = "ComfyUI stores MX scales in the order of another device's tiles, which no kernel here takes"


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise a checkpoint by `scale_weight`, `comfy_quant` or the marker: no other family has them."""
    described = _header_formats(checkpoint)

    def is_mx(name: str) -> bool:
        module = name.rpartition(".")[0]
        return states_exponents(described.get(module) or _tensor_format(checkpoint, beside(name, "comfy_quant")))

    pairs = pair_weights(
        checkpoint, quantization, lambda name: _scale_names(checkpoint, described, name), also_exponents=is_mx
    )
    weights = tuple(_without_block(weight) if is_mx(weight.weight) else weight for weight in pairs.weights)
    markers = tuple(name for name in fp8_names(checkpoint) if _is_marker(checkpoint, name))
    return Layout(_NAME, weights, pairs.unpaired, markers) if any(pairs) or markers else None


def _without_block(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, block=None, block_problem=_SWIZZLED)


def _scale_names(checkpoint: Checkpoint, described: Mapping[str, Any], name: str) -> Iterator[str]:
    if name.rpartition(".")[2] == "weight":
        is_newer = name.rpartition(".")[0] in described or beside(name, "comfy_quant") in checkpoint.tensors
        yield beside(name, "weight_scale" if is_newer else "scale_weight")


def _header_formats(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Module -> what the header's `_quantization_metadata` says of it."""
    found: dict[str, Mapping[str, Any]] = {}
    for shard in checkpoint.shards:
        layers = _parse(shard.header.metadata.get("_quantization_metadata", "").encode()).get("layers")
        if isinstance(layers, dict):
            found |= {module: entry for module, entry in layers.items() if isinstance(entry, dict)}
    return found


def _tensor_format(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """What a tensor `comfy_quant` says; empty where there is none."""
    tensor = checkpoint.tensors.get(name)
    return _parse(read_small_tensor(checkpoint, name)) if tensor is not None and tensor.dtype == "U8" else {}


def _parse(text: bytes) -> Mapping[str, Any]:
    try:
        return parse_object(text, CONFIG)
    except JsonError:
        return {}


def _is_marker(checkpoint: Checkpoint, name: str) -> bool:
    return name.rpartition(".")[2] == _MARKER and checkpoint.tensors[name].elements <= _MARKER_ELEMENTS

"""compressed-tensors (llm-compressor): `x.weight` with `x.weight_scale`; the config says how scales lie.

`quantization_config.config_groups` holds one scheme or several; each has `targets` (module names, `re:`
patterns or module classes) and `weights` with `strategy`: tensor, channel, block (`block_structure`) or
group (`group_size`; with `scale_dtype` torch.uint8 the bytes are e8m0 exponents).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepinfer_prep.checkpoint import Checkpoint
from deepinfer_prep.container import TensorInfo
from deepinfer_prep.formats.base import (
    FLOAT_DTYPES,
    Layout,
    QuantizedWeight,
    fits,
    grid_problem,
    sibling,
)

_ACTIVATION_SUFFIXES = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale")


class CompressedTensors:
    """Checkpoints whose config says `quant_method: compressed-tensors`."""

    name = "compressed-tensors"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """The config alone decides: the tensor names occur in other families as well."""
        return checkpoint.quantization.get("quant_method") == self.name

    def layout(self, checkpoint: Checkpoint) -> Layout:
        """Pair each fp8 weight with its `weight_scale`; fp8 tensors that are scales themselves are refused."""
        schemes = _fp8_schemes(checkpoint)
        weights, refusals = [], []
        for name, tensor in checkpoint.tensors.items():
            if tensor.dtype != "F8_E4M3":
                continue
            scale = checkpoint.tensors.get(sibling(name, "weight_scale"))
            if name.rpartition(".")[2] == "weight_scale":
                refusals.append(name)
            elif scale is not None and (scale.dtype in FLOAT_DTYPES or _is_e8m0(scale, _scheme_of(name, schemes))):
                weights.append(_quantized_weight(tensor, scale, _scheme_of(name, schemes)))
        return Layout(
            self.name,
            tuple(weights),
            tuple(name for name in checkpoint.tensors if name.rpartition(".")[2] in _ACTIVATION_SUFFIXES),
            refusals=_refuse_fp8_scales(checkpoint, refusals),
        )


def _fp8_schemes(checkpoint: Checkpoint) -> list[Mapping[str, Any]]:
    groups = checkpoint.quantization.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    return [scheme for scheme in schemes if isinstance(scheme, dict) and _is_fp8(scheme.get("weights"))]


def _is_fp8(weights: Any) -> bool:
    return isinstance(weights, dict) and weights.get("type") == "float" and weights.get("num_bits") == 8


def _scheme_of(weight: str, schemes: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The `weights` arguments of the scheme that covers a weight; None where names cannot decide.

    A target that is a module class cannot be matched from names, so class targets decide only where
    all schemes left agree.
    """
    module = weight.rpartition(".")[0]
    named = [scheme for scheme in schemes if any(_matches(target, module) for target in scheme.get("targets") or ())]
    arguments = [scheme["weights"] for scheme in named or schemes]
    if not arguments or any(_geometry(other) != _geometry(arguments[0]) for other in arguments):
        return None
    first: Mapping[str, Any] = arguments[0]
    return first


def _matches(target: Any, module: str) -> bool:
    if not isinstance(target, str):
        return False
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def _geometry(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = ("strategy", "block_structure", "group_size", "scale_dtype")
    return tuple(repr(weights.get(key)) for key in keys)


def _is_e8m0(scale: TensorInfo, scheme: Mapping[str, Any] | None) -> bool:
    if scale.dtype == "F8_E8M0":
        return True
    return scale.dtype == "U8" and scheme is not None and scheme.get("scale_dtype") in ("torch.uint8", "uint8")


def _quantized_weight(weight: TensorInfo, scale: TensorInfo, scheme: Mapping[str, Any] | None) -> QuantizedWeight:
    block, problem = _block(weight, scale, scheme)
    return QuantizedWeight(weight.name, scale.name, "e4m3", block, block_problem=problem)


def _block(
    weight: TensorInfo, scale: TensorInfo, scheme: Mapping[str, Any] | None
) -> tuple[tuple[int, int] | None, str]:
    if scheme is None:
        return None, "the config does not say which of its schemes covers this weight"
    if len(weight.shape) < 2:
        return None, f"the weight has the shape {list(weight.shape)}, which is not a matrix"
    rows, columns = weight.shape[-2:]
    match scheme.get("strategy"):
        case "tensor":
            return ((rows, columns), "") if scale.elements == 1 else (None, _unlike("one value", scale))
        case "channel":
            fitting = scale.shape in ((rows,), (*weight.shape[:-1], 1))
            return ((1, columns), "") if fitting else (None, _unlike("one value a row", scale))
        case "block" if _is_pair(scheme.get("block_structure")):
            block = (scheme["block_structure"][0], scheme["block_structure"][1])
        case "group" if isinstance(scheme.get("group_size"), int) and scheme["group_size"] > 0:
            block = (1, scheme["group_size"])
        case other:
            return None, f"the config's strategy {other!r} is not one of tensor, channel, block and group"
    if fits(weight, scale, "e4m3", block):
        return block, ""
    return None, grid_problem(weight, scale, "e4m3", block)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int and number > 0 for number in value)


def _unlike(expected: str, scale: TensorInfo) -> str:
    return f"the config says {expected}, but the scale has the shape {list(scale.shape)}"


def _refuse_fp8_scales(checkpoint: Checkpoint, names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (
        f"{checkpoint.where(names[0])} is one of {len(names):,} F8_E4M3 tensors that are block scales of packed "
        "4-bit weights (NVFP4), not weights. Halving them would be wrong, and Trainium2 has no kernel for this format. "
        "Use an fp8 or bf16 checkpoint of the model instead.",
    )

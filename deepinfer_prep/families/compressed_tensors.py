"""compressed-tensors (llm-compressor): `x.weight` with `x.weight_scale`; the config says how scales lie.

`quantization_config.config_groups` holds one scheme or several; each has `targets` (module names, `re:`
patterns or module classes) and `weights` with `strategy`: tensor, channel, block (`block_structure`) or
group (`group_size`; with `scale_dtype` torch.uint8 the bytes are e8m0 exponents). Packed integers and fp4
(`weight_packed`) hold no fp8 weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from deepinfer_prep.families.block_size import Blocks, fits, grid_problem, not_a_matrix
from deepinfer_prep.families.pairing import appended, beside, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import as_block
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import FP8_DTYPE

_NAME = "compressed-tensors"

Scheme = Mapping[str, Any]
"""The `weights` arguments of one group of the config."""


def layout(checkpoint: Checkpoint) -> Layout | None:
    """Recognise a checkpoint by its config's `quant_method`: the tensor names occur in other families as well."""
    if checkpoint.quantization.get("quant_method") != _NAME:
        return None
    groups = _fp8_groups(checkpoint.quantization)
    is_mx = str(checkpoint.quantization.get("format", "")).startswith("mxfp8")
    pairs = pair_weights(
        checkpoint,
        lambda name: appended(name, "_scale"),
        lambda weight, scale: _blocks(weight, scale, _scheme_of(weight.name, groups)),
        has_exponents=lambda name: is_mx or _stores_exponents(_scheme_of(name, groups)),
    )
    return Layout(_NAME, pairs.weights, pairs.unpaired, warnings=_packed_warning(checkpoint))


class _Group(NamedTuple):
    """The fp8 groups of the config whose scales lie in one way: the modules that they name, and that way."""

    modules: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    scheme: Scheme

    def names(self, module: str) -> bool:
        return module in self.modules or any(pattern.match(module) for pattern in self.patterns)


def _fp8_groups(quantization: Mapping[str, Any]) -> list[_Group]:
    groups = quantization.get("config_groups")
    values = list(groups.values()) if isinstance(groups, dict) else []
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for value in values:
        if isinstance(value, dict) and _is_fp8(value.get("weights")):
            alike.setdefault(_geometry(value["weights"]), []).append(value)
    return [_merge(group) for group in alike.values()]


def _merge(groups: list[Mapping[str, Any]]) -> _Group:
    listed = [group["targets"] for group in groups if isinstance(group.get("targets"), list)]
    targets = [target for each in listed for target in each if isinstance(target, str)]
    patterns = (_compile(target[3:]) for target in targets if target.startswith("re:"))
    known = tuple(pattern for pattern in patterns if pattern is not None)
    return _Group(frozenset(targets), known, groups[0]["weights"])


def _compile(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _is_fp8(weights: Any) -> bool:
    return isinstance(weights, dict) and weights.get("type") == "float" and weights.get("num_bits") == 8


def _scheme_of(weight: str, groups: list[_Group]) -> Scheme | None:
    """The `weights` arguments of the group that covers a weight; None where names cannot decide.

    A target that is a module class cannot be matched from names, so class targets decide only where
    all groups left agree.
    """
    if len(groups) > 1:
        module = weight.rpartition(".")[0]
        groups = [group for group in groups if group.names(module)] or groups
    return groups[0].scheme if len(groups) == 1 else None


def _geometry(scheme: Scheme) -> tuple[Any, ...]:
    keys = ("strategy", "block_structure", "group_size", "scale_dtype")
    return tuple(repr(scheme.get(key)) for key in keys)


def _stores_exponents(scheme: Scheme | None) -> bool:
    return scheme is not None and scheme.get("scale_dtype") in ("torch.uint8", "uint8")


def _blocks(weight: TensorInfo, scale: TensorInfo, scheme: Scheme | None) -> Blocks:
    if scheme is None:
        return Blocks(None, "the config does not say which of its schemes covers this weight")
    if len(weight.shape) < 2:
        return not_a_matrix(weight)
    rows, columns = weight.shape[-2:]
    block = as_block(scheme.get("block_structure"))
    match scheme.get("strategy"):
        case "tensor":
            whole = Blocks((max(1, rows), max(1, columns)))
            return whole if scale.elements == 1 else Blocks(None, _unlike("one value", scale))
        case "channel":
            is_fitting = scale.shape in (weight.shape[:-1], (*weight.shape[:-1], 1))
            return Blocks((1, max(1, columns))) if is_fitting else Blocks(None, _unlike("one value a row", scale))
        case "block" if block is not None:
            pass
        case "group" if type(scheme.get("group_size")) is int and scheme["group_size"] > 0:
            block = (1, scheme["group_size"])
        case other:
            return Blocks(None, f"the config's strategy {other!r} is not one of tensor, channel, block and group")
    if fits(weight, scale, "e4m3", block):
        return Blocks(block)
    return Blocks(None, grid_problem(weight, scale, "e4m3", block))


def _unlike(expected: str, scale: TensorInfo) -> str:
    return f"the config says {expected}, but the scale has the shape {list(scale.shape)}"


def _packed_warning(checkpoint: Checkpoint) -> tuple[str, ...]:
    packed = (name for name in checkpoint.tensors if name.endswith(".weight_packed"))
    scales = {name: checkpoint.tensors.get(beside(name, "weight_scale")) for name in packed}
    names = [name for name, scale in scales.items() if scale is None or scale.dtype != FP8_DTYPE]
    if not names:
        return ()
    kind = checkpoint.quantization.get("format", "packed")
    return (
        f"{len(names):,} weights are stored in fewer than eight bits ({kind}), {names[0]} among them. Nothing in them "
        "is e4m3: they and their scales are copied as they are.",
    )

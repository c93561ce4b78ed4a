"""Pairs fp8 weights with scales by name: for each weight it looks for the scale, never the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from deepinfer_prep.families.protocol import Unpaired, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import FLOAT_DTYPES, QuantizedWeight

ScaleNames = Callable[[str], Iterable[str]]
"""Weight name -> the names that its scale may have; none for tensors that are not of the family."""


class Pairs(NamedTuple):
    """The weights whose scale was found, and those whose scale is there but cannot be used."""

    weights: tuple[QuantizedWeight, ...]
    unpaired: dict[str, Unpaired]


def pair_weights(
    checkpoint: Checkpoint,
    quantization: Quantization,
    scale_names: ScaleNames,
    *,
    also_exponents: Callable[[str], bool] = lambda _: False,
    no_kernel_scale: str = "",
) -> Pairs:
    """Pair every fp8 weight whose scale, by name, is in the checkpoint; the others are left to other families.

    A weight with several such scales is paired with each, which leaves it ambiguous.

    Args:
        also_exponents: whether something other than the configs says that a weight's U8 scale is e8m0.
        no_kernel_scale: the reason why no kernel takes these weights.
    """
    weights: list[QuantizedWeight] = []
    unpaired: dict[str, Unpaired] = {}
    for name in fp8_names(checkpoint):
        for scale in (checkpoint.tensors[found] for found in scale_names(name) if found in checkpoint.tensors):
            problem = scale_problem(
                scale, scale.dtype == "U8" and (quantization.has_exponents(name) or also_exponents(name))
            )
            if problem is not None:
                unpaired[name] = problem
                continue
            blocks = quantization.blocks(checkpoint.tensors[name], scale)
            weights.append(QuantizedWeight(name, scale.name, "e4m3", blocks.size, blocks.problem, no_kernel_scale))
    return Pairs(tuple(weights), unpaired)


def beside(name: str, last: str) -> str:
    """The name of another tensor of the same module: beside("x.weight", "scale") is "x.scale"."""
    module = name.rpartition(".")[0]
    return f"{module}.{last}" if module else last


def appended(name: str, *suffixes: str) -> Iterator[str]:
    """The names that a weight's scale has where it is the weight's own name with a suffix.

    appended("x.weight", "_scale") gives "x.weight_scale". Fused and stacked experts are parameters of other names:
    appended("x.experts.down_proj", "_scale") gives "x.experts.down_proj_scale" and ..."_weight_scale", and
    appended("x.experts.w13_weight", "_scale") "x.experts.w13_weight_scale".
    """
    is_weight = name == "weight" or name.endswith((".weight", "_weight"))
    for suffix in suffixes:
        yield name + suffix
        if not is_weight:
            yield f"{name}_weight{suffix}"


def scale_problem(scale: TensorInfo, has_exponents: bool) -> Unpaired | None:
    """Why a tensor cannot be doubled as a scale, from its dtype; None where it can."""
    if scale.dtype in FLOAT_DTYPES or scale.dtype == "F8_E8M0":
        return None
    last = scale.name.rpartition(".")[2]
    if scale.dtype != "U8":
        return Unpaired(
            f"have a scale `{last}` of dtype {scale.dtype}",
            "Scales are floats or e8m0 exponents; this is another format, and nothing says how to double it.",
        )
    if has_exponents:
        return None
    return Unpaired(
        f"have a scale `{last}` of dtype U8, and the config does not say what its bytes mean",
        'If they are e8m0 exponents, state "scale_fmt": "ue8m0" in the quantization_config of config.json, or say it '
        f"with --map '*.weight=*.{last}:e8m0'. Read as numbers they would be wrong by many orders of magnitude.",
    )

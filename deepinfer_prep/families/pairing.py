"""Pairs fp8 weights with scales by name: for each weight it looks for the scale, never the other way round."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deepinfer_prep.families.block_size import Blocks
from deepinfer_prep.families.protocol import Unpaired, fp8_names
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import FLOAT_DTYPES, QuantizedWeight

ScaleName = Callable[[str], str | None]
"""Weight name -> the name that its scale would have; None for names that are not of the family."""

BlocksOf = Callable[[TensorInfo, TensorInfo], Blocks]
"""(weight, scale) -> how many rows and columns of the weight one value of the scale covers."""


class Pairs(NamedTuple):
    """The weights whose scale was found, and those whose scale is there but cannot be used."""

    weights: tuple[QuantizedWeight, ...]
    unpaired: dict[str, Unpaired]


def pair_weights(
    checkpoint: Checkpoint,
    scale_name: ScaleName,
    blocks_of: BlocksOf,
    *,
    has_exponents: Callable[[str], bool],
    no_kernel_scale: str = "",
) -> Pairs:
    """Pair every fp8 weight whose scale, by name, is in the checkpoint; the others are left to other families.

    Args:
        has_exponents: whether the config says that a weight's U8 scale is e8m0.
        no_kernel_scale: the reason why no kernel takes these weights.
    """
    weights: list[QuantizedWeight] = []
    unpaired: dict[str, Unpaired] = {}
    for name in fp8_names(checkpoint):
        wanted = scale_name(name)
        scale = checkpoint.tensors.get(wanted) if wanted is not None else None
        if scale is None:
            continue
        problem = scale_problem(scale, scale.dtype == "U8" and has_exponents(name))
        if problem is not None:
            unpaired[name] = problem
            continue
        blocks = blocks_of(checkpoint.tensors[name], scale)
        weights.append(QuantizedWeight(name, scale.name, "e4m3", blocks.size, blocks.problem, no_kernel_scale))
    return Pairs(tuple(weights), unpaired)


def beside(name: str, last: str) -> str:
    """The name of another tensor of the same module: beside("x.weight", "scale") is "x.scale"."""
    module = name.rpartition(".")[0]
    return f"{module}.{last}" if module else last


def appended(name: str, suffix: str) -> str | None:
    """The name of a weight's scale where it is the weight's own name with a suffix; None for what is no weight.

    appended("x.weight", "_scale") is "x.weight_scale". Fused and stacked experts hold parameters of other
    names: appended("x.experts.down_proj", "_scale_inv") is "x.experts.down_proj_scale_inv".
    """
    module, _, last = name.rpartition(".")
    stacked = module.rpartition(".")[2] == "experts"
    return name + suffix if stacked or last == "weight" or last.endswith("_weight") else None


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
        'If they are e8m0 exponents, state "scale_fmt": "ue8m0" in the quantization_config of config.json; '
        "read as numbers they would be wrong by many orders of magnitude.",
    )

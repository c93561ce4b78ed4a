"""Tensors beside an fp8 weight that may have a part in its quantization, besides the scale.

Halving the codes and doubling the scale keeps code x scale, and so any further factor. It does not keep
(code - zero point) x scale: zero points have to be zero, which their values tell. What is not known is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from deepinfer_prep.errors import list_some
from deepinfer_prep.families.activation_scales import looks_static
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import FP8_DTYPE, QuantizedWeight

_LOOKS_LIKE_A_PART = re.compile(
    r"scal|scl|zero|zp|offset|shift|amax|absmax|smooth|quant|qparam|factor|_inv|g_idx|perm", re.IGNORECASE
)
_HARMLESS = re.compile(r"(?:_ub|bias|comfy_quant|weight_shape|weight_packed)$")
_OF_ACTIVATIONS = re.compile(r"^(?:input|output|act|activation|a|k|v|q|kv|prob|qscale_act)(?:_|$)", re.IGNORECASE)
_ZERO_POINT = re.compile(r"zero|(?:^|[._])q?zps?(?:$|[._])|offset|shift", re.IGNORECASE)
_FACTOR = re.compile(r"scale_?2$|scale_inv_?2$|global_?scale|smooth|pre_?quant|second_scale", re.IGNORECASE)
_RECORD = re.compile(r"amax|absmax", re.IGNORECASE)
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class OtherFactors:
    """What lies beside the weights that are halved, sorted by what it means for halving."""

    zero_points: tuple[str, ...] = ()
    """Tensors that have to be all zero."""
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = field(default=())


def find_other_factors(
    checkpoint: Checkpoint, weights: Iterable[QuantizedWeight], claimed: Collection[str], confirmed: Collection[str]
) -> OtherFactors:
    """Sort the tensors beside the e4m3 weights whose names look like a part of their quantization.

    Args:
        claimed: tensors whose meaning is known: weights, scales, static scales, markers.
        confirmed: weights that the user paired with --map: what is not known beside them is copied and told.
    """
    kinds: dict[str, list[str]] = {"zero": [], "factor": [], "record": [], "static": [], "unknown": [], "near": []}
    doubled: dict[str, str] = {}
    for name, weight in _parts(checkpoint, weights, claimed):
        doubled[name] = weight.scale
        kind = _kind(name, weight.weight)
        kinds["near" if kind == "unknown" and weight.weight in confirmed else kind].append(name)
    return OtherFactors(
        tuple(kinds["zero"]), tuple(_warnings(kinds, doubled)), tuple(_refusals(checkpoint, kinds["unknown"]))
    )


def _parts(
    checkpoint: Checkpoint, weights: Iterable[QuantizedWeight], claimed: Collection[str]
) -> Iterator[tuple[str, QuantizedWeight]]:
    """(tensor, weight) for each unclaimed tensor that looks like a part of the weight's quantization."""
    stems: dict[str, QuantizedWeight] = {}
    for weight in weights:
        if weight.element == "e4m3":
            stems[_stem(weight.weight)] = weight
    for name, tensor in checkpoint.tensors.items():
        if name in claimed or not _LOOKS_LIKE_A_PART.search(name):
            continue
        # An fp8 tensor is a weight or has no scale, unless its name says what it is: older llm-compressors write zero
        # points in the weight's own dtype.
        if tensor.dtype == FP8_DTYPE and not _ZERO_POINT.search(name.rpartition(".")[2]):
            continue
        found = next((stems[stem] for stem in _stems_of(name) if stem in stems), None)
        if found is not None:
            rest = name[len(_stem(found.weight)) :].lstrip("._")
            if _LOOKS_LIKE_A_PART.search(rest) and not _HARMLESS.search(rest):
                yield name, found


def _stem(weight: str) -> str:
    """What the names of a weight's parts begin with: "x" for "x.weight", "x.w13" for "x.w13_weight"."""
    return weight.removesuffix("weight").rstrip("._") if weight.endswith(("weight",)) else weight


def _stems_of(name: str) -> Iterator[str]:
    """The beginnings of a name that could be a stem: up to its last separators, two modules deep at most."""
    ends = [match.start() for match in re.finditer(r"[._]", name)]
    depth = 0
    for end in reversed(ends):
        depth += name[end] == "."
        if depth > 2:
            return
        yield name[:end]


def _kind(name: str, weight: str) -> str:
    stem = _stem(weight)
    rest = name[len(stem) :].lstrip("._")
    if looks_static(name) or _OF_ACTIVATIONS.search(rest):
        return "factor" if _FACTOR.search(rest) else "static"
    if _ZERO_POINT.search(rest):
        return "zero"
    if _FACTOR.search(rest):
        return "factor"
    if _RECORD.search(rest):
        return "record"
    belongs = rest.startswith(("weight", "w_", "q", "scale")) or not weight.endswith("weight")
    return "unknown" if belongs else "near"


def _warnings(kinds: dict[str, list[str]], doubled: dict[str, str]) -> Iterator[str]:
    if kinds["zero"]:
        yield (
            f"{_counted(kinds['zero'], 'zero points or offsets')} lie beside fp8 weights. They are read before "
            "anything is written, and one that is not zero stops the run: halving would not keep "
            "(code - zero point) x scale."
        )
    if kinds["factor"]:
        first = kinds["factor"][0]
        yield (
            f"{_counted(kinds['factor'], 'further factors')} lie beside fp8 weights and are kept: of {first} and "
            f"{doubled[first]} only the latter is doubled, which keeps the product."
        )
    if kinds["record"]:
        yield (
            f"{_counted(kinds['record'], 'recorded largest values')} lie beside fp8 weights and are kept. A loader "
            "that computes a scale from them instead of reading the scale would be off by 2."
        )
    if kinds["static"]:
        yield (
            f"{_counted(kinds['static'], 'tensors')} look like scales of activations or of the KV cache, but nothing "
            "says that these are e4m3: they are kept as they are."
        )
    if kinds["near"]:
        yield f"{_counted(kinds['near'], 'tensors')} lie beside fp8 weights and look like scales of something: copied."


def _refusals(checkpoint: Checkpoint, names: list[str]) -> Iterator[str]:
    if names:
        yield (
            f"{len(names):,} tensors look like a part of an fp8 weight's quantization, but what they mean is not known"
            f": {list_some(names, _MOST_NAMES, checkpoint.where)}. If code x scale is the weight's value, whatever "
            "they hold or times what they hold, confirm the scale with --map WEIGHT=SCALE, and they are copied."
        )


def _counted(names: list[str], what: str) -> str:
    return f"{len(names):,} {what} ({list_some(names, _MOST_NAMES)})"

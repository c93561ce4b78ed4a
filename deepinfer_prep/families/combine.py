"""Combines what several families found in one checkpoint into one layout."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_prep.families.activation_scales import find_activation_scales
from deepinfer_prep.families.other_factors import find_other_factors
from deepinfer_prep.families.protocol import Layout, Unpaired, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import QuantizedWeight

UNKNOWN = "unknown"

NO_SCALE = Unpaired(
    "have no scale",
    "Without its scale a halved weight is half as large. If the scales lie in a file that was not downloaded, fetch "
    "it; if they have names of their own, name them with --map WEIGHT=SCALE.",
)


def combine(checkpoint: Checkpoint, quantization: Quantization, mapped: Layout, layouts: Iterable[Layout]) -> Layout:
    """One layout of the whole checkpoint; where the user paired a weight (`mapped`), no family is heard about it.

    A weight takes the scale and block of the first family that pairs it. If another family pairs it with another
    scale, it stays unpaired, because which scale multiplies it is not known. Every F8_E4M3 tensor ends as a weight, as
    a marker, as a zero point or as unpaired with a reason.
    """
    parts = [mapped, *layouts]
    chosen, rivals = _choose(mapped, parts)
    for name in rivals:
        del chosen[name]
    known: dict[str, Unpaired] = {}
    for part in reversed(parts):
        known |= part.unpaired
    known |= {name: _ambiguous(scales) for name, scales in rivals.items()}
    markers = tuple(name for part in parts for name in part.markers)
    weights = tuple(chosen[name] for name in checkpoint.tensors if name in chosen)
    activation_scales = find_activation_scales(checkpoint, quantization, weights)
    claimed = {name for weight in weights for name in (weight.weight, weight.scale)} | {*activation_scales, *markers}
    factors = find_other_factors(checkpoint, weights, claimed, {weight.weight for weight in mapped.weights})
    known_names = {*chosen, *markers, *factors.zero_points}
    open_names = [name for name in fp8_names(checkpoint) if name not in known_names]
    return Layout(
        family=_family_name(parts, chosen, frozenset(open_names)),
        weights=weights,
        unpaired={name: known.get(name, NO_SCALE) for name in open_names},
        markers=markers,
        activation_scales=activation_scales,
        zero_points=factors.zero_points,
        refusals=(*(refusal for part in parts for refusal in part.refusals), *factors.refusals),
        warnings=(*(warning for part in parts for warning in part.warnings), *factors.warnings),
    )


def _choose(mapped: Layout, parts: Iterable[Layout]) -> tuple[dict[str, QuantizedWeight], dict[str, dict[str, None]]]:
    """Weight name -> its pairing, and weight name -> the scales of those with more than one."""
    chosen: dict[str, QuantizedWeight] = {}
    rivals: dict[str, dict[str, None]] = {}
    decided = {weight.weight for weight in mapped.weights}
    for part in parts:
        for weight in part.weights:
            first = chosen.setdefault(weight.weight, weight)
            if first.scale != weight.scale and (part is mapped or weight.weight not in decided):
                rivals.setdefault(weight.weight, {first.scale: None})[weight.scale] = None
    return chosen, rivals


def _ambiguous(scales: Iterable[str]) -> Unpaired:
    lasts = " and ".join(f"`{scale.rpartition('.')[2]}`" for scale in scales)
    return Unpaired(
        f"have more than one tensor that could be their scale, {lasts}",
        "Which one multiplies the weight cannot be known. Say which with --map WEIGHT=SCALE, or remove the other.",
    )


def _family_name(parts: Iterable[Layout], chosen: dict[str, QuantizedWeight], unpaired: frozenset[str]) -> str:
    """The families that had a part in the result, joined; "unknown" where none had."""
    names = [
        part.family
        for part in parts
        if part.markers
        or part.refusals
        or part.warnings
        or not unpaired.isdisjoint(part.unpaired)
        or any(chosen.get(weight.weight) is weight for weight in part.weights)
    ]
    return " + ".join(dict.fromkeys(names)) or UNKNOWN

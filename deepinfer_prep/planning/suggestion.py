"""The --map that would pair fp8 weights, whose scale no family finds, with tensors that look like their scales."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepinfer_prep.families.activation_scales import looks_static
from deepinfer_prep.families.pairing import scale_problem
from deepinfer_prep.families.patterns import compile_pattern, fill_pattern
from deepinfer_prep.families.user_map import EXPONENTS
from deepinfer_prep.files.checkpoint import Checkpoint

_RECORD = re.compile("amax", re.IGNORECASE)


class Suggestion(NamedTuple):
    """A --map and how many of the weights it pairs."""

    text: str
    pairs: int


def suggest_map(checkpoint: Checkpoint, weights: Sequence[str], scales: Sequence[str]) -> Suggestion | None:
    """The --map that pairs most of `weights`, made from the first of them and one of `scales`; None if there is none.

    Recorded largest values and scales of activations are none that a weight is multiplied by.
    """
    found: list[Suggestion] = []
    for scale in scales:
        tensor = checkpoint.tensors[scale]
        if scale_problem(tensor, has_exponents=True) is None and not _RECORD.search(scale) and not looks_static(scale):
            suffix = EXPONENTS if tensor.dtype == "U8" else ""
            found += (
                Suggestion(f"{weight}={pattern}{suffix}", _count(checkpoint, weights, weight, pattern))
                for weight, pattern in _patterns(weights[0], scale)
            )
    best = max(found, key=lambda suggestion: suggestion.pairs, default=None)
    return best if best is not None and best.pairs else None


def _patterns(weight: str, scale: str) -> Iterator[tuple[str, str]]:
    """Pairs of patterns that pair these two names, the plainest first."""
    module, _, last = weight.rpartition(".")
    if scale.startswith(weight) and last != "weight" and module:
        parent = module.rpartition(".")[2]
        yield f"*.{parent}.*", f"*.{parent}.*{scale[len(weight) :]}"
    shared = _shared_start(weight, scale)
    if shared:
        yield f"*.{weight[shared:]}", f"*.{scale[shared:]}"
        yield f"*.{_any_number(weight[shared:])}", f"*.{scale[shared:]}"
    for first in range(1, weight.count(".") + 1):
        inner = ".".join(weight.split(".")[first:-1])
        if inner and f".{inner}." in f".{scale}":
            before, _, after = scale.partition(inner)
            yield f"{'.'.join(weight.split('.')[:first])}.*.{last}", f"{before}*{after}"
    yield weight, scale


def _shared_start(weight: str, scale: str) -> int:
    """Length of the modules that both names start with, the dot included."""
    length = 0
    for first, second in zip(weight.split(".")[:-1], scale.split(".")[:-1], strict=False):
        if first != second:
            break
        length += len(first) + 1
    return length


def _any_number(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _count(checkpoint: Checkpoint, weights: Sequence[str], weight: str, scale: str) -> int:
    """How many weights the map pairs with a tensor that is there."""
    if scale.count("*") > weight.count("*"):
        return 0
    pattern = compile_pattern(weight)
    matches = (pattern.fullmatch(name) for name in weights)
    return sum(match is not None and fill_pattern(scale, match.groups()) in checkpoint.tensors for match in matches)

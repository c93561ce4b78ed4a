"""The fp8 weights of a live model, their scales, and which of them have to change together.

Everything is told apart by the bytes it covers, not by names or objects: tied weights, slices of one storage
and views of views each count for the bytes they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepinfer_prep.runtime import held_tensors
from deepinfer_prep.runtime.rescaling.byte_spans import Spans, sharing, spans_of

_OTHER_QUANTIZED = (torch.int8, torch.uint8, torch.float8_e5m2)


@dataclass(frozen=True, slots=True, eq=False)
class NamedSpans:
    """A distinct set of bytes that some names lead to."""

    name: str
    """The first of its names."""
    spans: Spans
    kind: str = ""
    """For a scale what its elements are (`scales.kind`)."""


@dataclass(slots=True)
class Survey:
    """What a model holds, found without changing anything."""

    weights: list[NamedSpans] = field(default_factory=list)
    """Float8_e4m3fn weights."""
    scales: list[NamedSpans] = field(default_factory=list)
    """Scales of `weights`."""
    pairs: set[tuple[int, int]] = field(default_factory=set)
    """Index of a weight, index of a scale that multiplies it."""
    fixed: list[NamedSpans] = field(default_factory=list)
    """Scales of quantized weights of other formats, which keep their values."""
    refusals: list[str] = field(default_factory=list)
    """Why the model cannot be rescaled, each a whole sentence."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights and scales that have to change together."""

    weights: list[NamedSpans]
    scales: list[NamedSpans]


def survey(model: nn.Module) -> Survey:
    """Find every fp8 weight of a model and every scale that belongs to a quantized weight."""
    found = Survey()
    weights, weight_scales, fixed = _Distinct(found.weights), _Distinct(found.scales), _Distinct(found.fixed)
    held = list(held_tensors.held_tensors(model))
    used_as_scale = {id(scale) for holder in held for _, scale in holder.scales}
    for holder in held:
        if holder.tensor.dtype in _OTHER_QUANTIZED:
            for name, scale in holder.scales:
                if not _out_of_reach(scale):
                    fixed.add(name, scale)
        if holder.tensor.dtype != torch.float8_e4m3fn or (not holder.scales and not holder.loaded):
            continue
        refusal = _refusal(holder, id(holder.tensor) in used_as_scale)
        if refusal:
            found.refusals.append(refusal)
            continue
        weight = weights.add(holder.name, holder.tensor)
        for name, scale in holder.scales:
            found.pairs.add((weight, weight_scales.add(name, scale, held_tensors.kind(scale) or "")))
    return found


def weight_groups(found: Survey) -> list[WeightGroup]:
    """Group weights and scales: whatever shares bytes, or multiplies one another, is in one group."""
    offset = len(found.weights)
    groups = _Groups(offset + len(found.scales))
    groups.tie([weight, offset + scale] for weight, scale in found.pairs)
    groups.tie(sharing([weight.spans for weight in found.weights]))
    groups.tie([offset + scale for scale in tie] for tie in sharing([scale.spans for scale in found.scales]))
    members: dict[int, WeightGroup] = {}
    for node, named in enumerate([*found.weights, *found.scales]):
        group = members.setdefault(groups.leader(node), WeightGroup([], []))
        (group.weights if node < offset else group.scales).append(named)
    return list(members.values())


def clashes(found: Survey, changing: list[WeightGroup]) -> Iterator[str]:
    """Sentences about bytes that would have to change in two ways, or to change and to stay."""
    labelled = [(weight, "an fp8 weight") for weight in found.weights]
    labelled += [(scale, f"a scale of {scale.kind}") for group in changing for scale in group.scales]
    labelled += [(scale, "the scale of a weight that is not halved") for scale in found.fixed]
    for tie in sharing([named.spans for named, _ in labelled]):
        roles = {labelled[index][1]: labelled[index][0].name for index in tie}
        if len(roles) > 1:
            yield "The same bytes are " + " and ".join(f"{role} ({name})" for role, name in roles.items()) + "."


class _Distinct:
    """Regions, each entered once under the first name that leads to it."""

    def __init__(self, entries: list[NamedSpans]) -> None:
        self._entries = entries
        self._indices: dict[object, int] = {}

    def add(self, name: str, tensor: torch.Tensor, kind: str = "") -> int:
        spans = spans_of(tensor)
        index = self._indices.setdefault((spans.identity, kind), len(self._entries))
        if index == len(self._entries):
            self._entries.append(NamedSpans(name, spans, kind))
        return index


class _Groups:
    """Union-find over numbers."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def leader(self, node: int) -> int:
        while self._parents[node] != node:
            self._parents[node] = self._parents[self._parents[node]]
            node = self._parents[node]
        return node

    def tie(self, groups: Iterable[list[int]]) -> None:
        for group in groups:
            for node in group[1:]:
                self._parents[self.leader(node)] = self.leader(group[0])


def _refusal(holder: held_tensors.Held, used_as_scale: bool) -> str | None:
    name = holder.name
    if used_as_scale or name.endswith(("scale", "scales", "scale_inv")):
        return f"{name}: float8_e4m3fn is used as a scale here (NVFP4), which no Trainium2 kernel takes."
    if not holder.scales:
        return (
            f"{name}: float8_e4m3fn without a scale. Attach it as `.sf`, or as {name}_scale_inv or {name}_scale beside "
            "it; if the model was copied (deepcopy drops attributes) or the scale was not loaded, load it again. A "
            "buffer that is no weight has to be registered with persistent=False."
        )
    for tensor_name, tensor in ((name, holder.tensor), *holder.scales):
        if problem := _out_of_reach(tensor):
            return f"{tensor_name}: {problem}"
    for scale_name, scale in holder.scales:
        if held_tensors.kind(scale) is None:
            return (
                f"{scale_name}: a scale of dtype {scale.dtype}, which is no known form. Expected a float type, "
                "float8_e8m0fnu, or e8m0 bytes as uint8 or packed into int16 or int32 words."
            )
    return None


def _out_of_reach(tensor: torch.Tensor) -> str | None:
    if tensor.device.type == "meta":
        return "is on the meta device. Load the weights before rescaling them."
    if is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}, whose memory lies elsewhere. Rescale the local tensors that it wraps."
    return None

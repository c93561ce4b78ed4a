"""Checkpoint and model -> plan: which parts of which tensors fill every slot, and all that does not fit.

Nothing is read here but headers and the manifest, and nothing of the model changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from deepinfer_prep.errors import RefusedError, list_some
from deepinfer_prep.runtime.attributes import KERNEL_ORDER
from deepinfer_prep.runtime.dtypes import FLOAT_NAMES, holds_same_bytes
from deepinfer_prep.runtime.loading.assembly import Assembly, AssemblyError, SourcePart, assemble, pad_rows, row_axis
from deepinfer_prep.runtime.loading.attachments import Attachments, attachments_of
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.kernel_order import KernelOrder, kernel_order_of
from deepinfer_prep.runtime.loading.rules import LoadRules, is_named
from deepinfer_prep.runtime.loading.scale_form import ScaleFormError
from deepinfer_prep.runtime.loading.slices import Slice, SliceError, part_shape
from deepinfer_prep.runtime.loading.slots import Slot, Slots, slots_of

_MOST_NAMES = 20
_CASTABLE = (*FLOAT_NAMES, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSlot:
    """A slot, what fills it, and what is attached to it."""

    slot: Slot
    value: Assembly
    attachments: Attachments
    kernel_order: KernelOrder | None
    """Of a weight whose bytes go into the slot in that order."""

    @property
    def is_cast(self) -> bool:
        """Whether the values change their dtype on the way."""
        return not holds_same_bytes(self.value.dtype, self.slot.tensor.dtype)


@dataclass(frozen=True, slots=True)
class TiedTensor:
    """A tensor that is not loaded, because its parameter is tied to one that another tensor fills."""

    dropped: str
    loaded: str
    part: Slice
    """Of both."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """A load decided in full; `missing` and `unexpected` hold what the rules allow to be."""

    model: Slots
    slots: tuple[PlannedSlot, ...]
    """Those that are filled."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]
    """Tensors that `rename` declined."""
    tied: tuple[TiedTensor, ...]


@dataclass(slots=True)
class _Matching:
    pieces: dict[str, list[SourcePart]] = field(default_factory=dict)
    """By parameter name."""
    parts: dict[str, Slice] = field(default_factory=dict)
    """Of every tensor that goes into the model, scales excepted."""
    unexpected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def plan_load(model: nn.Module, checkpoint: PreparedCheckpoint, rules: LoadRules) -> LoadPlan:
    """Match a checkpoint with a model.

    Raises:
        RefusedError: something does not fit; everything that does not is named.
        TypeError: a function of the rules returned something that it must not.
    """
    slots = slots_of(model)
    by_name = slots.by_name
    matching = _match(checkpoint, by_name, rules)
    chosen, tied = _choose(by_name, matching)
    planned = tuple(_planned(checkpoint, by_name, chosen, rules, matching.problems))
    missing = _missing(by_name, chosen)
    refused_missing = [name for name in missing if rules.strict and not is_named(name, rules.allow_missing)]
    refused_unexpected = [
        name for name in matching.unexpected if rules.strict and not is_named(name, rules.allow_unexpected)
    ]
    if matching.problems or refused_missing or refused_unexpected:
        raise RefusedError(*_reasons(checkpoint, matching.problems, refused_missing, refused_unexpected))
    return LoadPlan(slots, planned, tuple(missing), tuple(matching.unexpected), tuple(matching.skipped), tied)


def _match(checkpoint: PreparedCheckpoint, by_name: Mapping[str, Slot], rules: LoadRules) -> _Matching:
    matching = _Matching()
    users = _users_of_scales(checkpoint)
    # Scales last: one that is a parameter itself follows its weights.
    for name in sorted(checkpoint.names, key=lambda name: name in users):
        targets = rules.targets(name)
        known = [target for target in targets if target.parameter in by_name]
        if not targets:
            matching.skipped.append(name)
        elif len(known) < len(targets) and name not in users:
            matching.unexpected.append(name)
        if known:
            try:
                part = _part(checkpoint, matching, name, users.get(name, ()), rules)
                shape = part_shape(part, checkpoint.tensor(name).shape, f"tensor {name!r}")
            except SliceError as error:
                matching.problems.append(str(error))
                continue
            for target in known:
                matching.pieces.setdefault(target.parameter, []).append(SourcePart(name, part, shape, target))
    return matching


def _users_of_scales(checkpoint: PreparedCheckpoint) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for weight, record in checkpoint.manifest.weights.items():
        users.setdefault(record.scale, []).append(weight)
    return users


def _part(
    checkpoint: PreparedCheckpoint, matching: _Matching, name: str, users: Sequence[str], rules: LoadRules
) -> Slice:
    loaded = [user for user in users if user in matching.parts]
    if loaded:
        return _common_part(checkpoint, name, loaded, matching.parts)
    part = rules.part(name)
    if not users:
        matching.parts[name] = part
    return part


def _common_part(checkpoint: PreparedCheckpoint, scale: str, weights: list[str], parts: Mapping[str, Slice]) -> Slice:
    """A scale that is a parameter itself follows its weight, or all of its weights alike."""
    wanted = {checkpoint.scale_part(weight, parts[weight]) for weight in weights}
    if len(wanted) > 1:
        raise SliceError(
            f"tensor {scale!r} scales {len(weights)} weights that are cut in different places, so one parameter cannot "
            "hold its part. Let `rename` return None for it: every weight then gets its own part as `.sf`."
        )
    return wanted.pop()


def _choose(
    by_name: Mapping[str, Slot], matching: _Matching
) -> tuple[dict[str, list[SourcePart]], tuple[TiedTensor, ...]]:
    """The pieces for each slot, by its first name that has some; other names of the slot are tied to that one."""
    chosen: dict[str, list[SourcePart]] = {}
    first_names: dict[int, str] = {}
    tied: dict[str, TiedTensor] = {}
    for name, slot in by_name.items():
        if name not in matching.pieces:
            continue
        first = first_names.setdefault(id(slot), name)
        if first == name:
            chosen[name] = matching.pieces[name]
            continue
        for dropped, loaded in zip(matching.pieces[name], _repeated(chosen[first]), strict=False):
            if dropped.name != loaded.name:
                tied[dropped.name] = TiedTensor(dropped.name, loaded.name, dropped.part)
    return chosen, tuple(tied.values())


def _repeated(pieces: list[SourcePart]) -> Iterator[SourcePart]:
    """The pieces, then the first one for ever: a name tied to a parameter may have more pieces than it."""
    yield from pieces
    while True:
        yield pieces[0]


def _planned(
    checkpoint: PreparedCheckpoint,
    by_name: Mapping[str, Slot],
    chosen: Mapping[str, list[SourcePart]],
    rules: LoadRules,
    problems: list[str],
) -> Iterator[PlannedSlot]:
    places = _parameters_of(chosen)
    for name, pieces in chosen.items():
        slot = by_name[name]
        try:
            dtypes = {checkpoint.tensor(piece.name).dtype for piece in pieces}
            if len(dtypes) > 1:
                raise AssemblyError(f"{list_some(pieces, 3, lambda piece: repr(piece.name))} have different dtypes")
            value = assemble(pieces, dtypes.pop())
            if is_named(name, rules.pad_rows):
                value = _padded(value, tuple(slot.tensor.shape))
            problem = _mismatch(checkpoint, name, slot.tensor, value, rules)
            if problem:
                problems.append(problem)
                continue

            def scale_slot(scale: str, name: str = name) -> Slot | None:
                parameter = _beside(name, places.get(scale, ()))
                return None if parameter is None else by_name[parameter]

            attachments = attachments_of(checkpoint, value, scale_slot, rules.scale_form(name))
        except (AssemblyError, ScaleFormError, SliceError) as error:
            problems.append(f"{name}: {error}.".replace("..", "."))
            continue
        is_flat = slot.is_meta or slot.tensor.is_contiguous()
        order = kernel_order_of(checkpoint, value, attachments) if is_flat else None
        yield PlannedSlot(slot, value, attachments, order)


def _parameters_of(chosen: Mapping[str, list[SourcePart]]) -> dict[str, list[str]]:
    """The parameters that each tensor fills."""
    found: dict[str, list[str]] = {}
    for name, pieces in chosen.items():
        for piece in pieces:
            if name not in found.setdefault(piece.name, []):
                found[piece.name].append(name)
    return found


def _beside(parameter: str, candidates: Sequence[str]) -> str | None:
    """Of the parameters that a scale fills, the one that belongs to a weight's: the only one, or of its module."""
    if len(candidates) == 1:
        return candidates[0]
    module = parameter.rpartition(".")[0]
    return next((name for name in candidates if name.rpartition(".")[0] == module), None)


def _padded(value: Assembly, wanted: tuple[int, ...]) -> Assembly:
    """Padding up to the rows of the parameter, where everything else fits."""
    axis = row_axis(wanted)
    same = len(wanted) == len(value.shape) > 0 and value.shape[:axis] == wanted[:axis]
    if not same or value.shape[axis + 1 :] != wanted[axis + 1 :] or value.shape[axis] > wanted[axis]:
        return value
    return pad_rows(value, wanted[axis], is_scale=False)


def _mismatch(checkpoint: PreparedCheckpoint, name: str, found: torch.Tensor, value: Assembly, rules: LoadRules) -> str:
    if hasattr(found, KERNEL_ORDER):
        return (
            f"{name} was loaded in the kernels' order before, which changed its shape and dtype; to load it again, "
            "build the model anew."
        )
    if tuple(found.shape) != value.shape:
        return (
            f"{name}: wrong shape: the model has {list(found.shape)}, the checkpoint gives {list(value.shape)} "
            f"(from {value.sources})." + _shape_remedy(tuple(found.shape), value.shape)
        )
    if holds_same_bytes(value.dtype, found.dtype):
        return ""
    is_quantized = any(place.piece.name in checkpoint.manifest.weights for place in value.places)
    is_castable = value.dtype in _CASTABLE and found.dtype in FLOAT_NAMES and not is_quantized
    if is_castable and is_named(name, rules.cast):
        return ""
    scales = {record.scale for record in checkpoint.manifest.weights.values()}
    is_scale = all(place.piece.name in scales for place in value.places)
    return (
        f"{name}: wrong dtype: the model has {found.dtype}, the checkpoint gives {value.dtype} "
        f"(from {value.sources}). {_dtype_remedy(name, value.dtype, is_quantized, is_castable, is_scale)}"
    )


def _shape_remedy(found: tuple[int, ...], given: tuple[int, ...]) -> str:
    axis = row_axis(found)
    if len(found) == len(given) > 0 and found[axis] > given[axis] and found[axis + 1 :] == given[axis + 1 :]:
        return " If its last rows are padding, name the parameter in `pad_rows`."
    return ""


def _dtype_remedy(name: str, dtype: torch.dtype, is_quantized: bool, is_castable: bool, is_scale: bool) -> str:
    if is_quantized:
        return (
            f"A quantized weight means nothing without its scale: create the parameter as {dtype}, or dequantize what "
            "PreparedCheckpoint.read_weight returns."
        )
    remedies = ["let `rename` return None for the scale, and its weight gets it as `.sf`"] if is_scale else []
    remedies.append(f"create the parameter as {dtype}")
    remedies += [f"have the values converted with cast=[{name!r}]"] if is_castable else []
    return "Either " * (len(remedies) > 1) + ", or ".join(remedies) + "."


def _missing(by_name: Mapping[str, Slot], chosen: Mapping[str, list[SourcePart]]) -> list[str]:
    filled = {id(by_name[name]) for name in chosen}
    return [name for name, slot in by_name.items() if id(slot) not in filled and name == slot.name]


def _reasons(
    checkpoint: PreparedCheckpoint, problems: list[str], missing: list[str], unexpected: list[str]
) -> Iterator[str]:
    yield f"{checkpoint.folder} does not fit the model."
    yield from problems[:_MOST_NAMES]
    if len(problems) > _MOST_NAMES:
        yield f"And {len(problems) - _MOST_NAMES:,} more of the same kinds."
    if missing:
        yield (
            f"{len(missing):,} missing: no tensor of the checkpoint goes to {list_some(missing, _MOST_NAMES)}. Name in "
            "`allow_missing` what the model fills itself."
        )
    if unexpected:
        yield (
            f"{len(unexpected):,} unexpected: the model has no place for {list_some(unexpected, _MOST_NAMES)}. "
            "Let `rename` return the parameter's name, or None to leave a tensor out."
        )
    yield "Nothing was loaded."

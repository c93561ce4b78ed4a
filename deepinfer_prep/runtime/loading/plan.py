"""Checkpoint and model -> plan: which parts of which tensors fill every slot, and all that does not fit.

Nothing is read here but headers and the manifest, and nothing of the model changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from deepinfer_prep.errors import RefusedError, list_some
from deepinfer_prep.runtime.dtypes import holds_same_bytes
from deepinfer_prep.runtime.loading.assembly import Assembly, AssemblyError, SourcePart, Target, assemble
from deepinfer_prep.runtime.loading.attachments import Attachments, attachments_of
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.slices import WHOLE, Slice, SliceError, part_shape
from deepinfer_prep.runtime.loading.slots import Slot, Slots, slots_of

Rename = Callable[[str], str | Target | None]
Slices = Callable[[str], Slice | None]

_MOST_NAMES = 20


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSlot:
    """A slot, what fills it, and what is attached to it."""

    slot: Slot
    value: Assembly
    attachments: Attachments


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """A load decided in full; `missing` and `unexpected` are empty unless they were to be left out."""

    model: Slots
    slots: tuple[PlannedSlot, ...]
    """Those that are filled."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]
    """Tensors that `rename` declined."""
    tied: Mapping[str, str]
    """Names that share a tensor of the model with another name, which was loaded -> that name."""


@dataclass(slots=True)
class _Matching:
    pieces: dict[str, list[SourcePart]] = field(default_factory=dict)
    """By parameter name."""
    parts: dict[str, Slice] = field(default_factory=dict)
    """Of every tensor that goes into the model, scales excepted."""
    unexpected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def plan_load(
    model: nn.Module, checkpoint: PreparedCheckpoint, rename: Rename | None, slices: Slices | None, strict: bool
) -> LoadPlan:
    """Match a checkpoint with a model.

    Raises:
        RefusedError: something does not fit; everything that does not is named.
    """
    slots = slots_of(model)
    by_name = slots.by_name
    matching = _match(checkpoint, by_name, rename or str, slices or (lambda name: WHOLE))
    chosen, tied = _choose(by_name, matching)
    planned = tuple(_planned(checkpoint, by_name, chosen, matching.problems))
    missing = _missing(by_name, chosen)
    mismatch = (*missing, *matching.unexpected) if strict else ()
    if matching.problems or mismatch:
        raise RefusedError(*tuple(_reasons(checkpoint, matching, missing, strict)))
    return LoadPlan(slots, planned, tuple(missing), tuple(matching.unexpected), tuple(matching.skipped), tied)


def _match(checkpoint: PreparedCheckpoint, by_name: Mapping[str, Slot], rename: Rename, slices: Slices) -> _Matching:
    matching = _Matching()
    users = _users_of_scales(checkpoint)
    names = checkpoint.names
    for name in sorted(names, key=lambda name: name in users):
        wanted = rename(name)
        target = Target(wanted) if isinstance(wanted, str) else wanted
        if target is None:
            matching.skipped.append(name)
        elif target.parameter in by_name:
            _add_piece(checkpoint, matching, name, target, users.get(name, ()), slices)
        elif name not in users:
            matching.unexpected.append(name)
    return matching


def _users_of_scales(checkpoint: PreparedCheckpoint) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for weight, record in checkpoint.manifest.weights.items():
        users.setdefault(record.scale, []).append(weight)
    return users


def _add_piece(
    checkpoint: PreparedCheckpoint,
    matching: _Matching,
    name: str,
    target: Target,
    users: list[str] | tuple[()],
    slices: Slices,
) -> None:
    tensor = checkpoint.tensor(name)
    try:
        loaded = [user for user in users if user in matching.parts]
        part = _common_part(checkpoint, name, loaded, matching.parts) if loaded else slices(name) or WHOLE
        shape = part_shape(part, tensor.shape, f"tensor {name!r}")
    except SliceError as error:
        matching.problems.append(str(error))
        return
    if not users:
        matching.parts[name] = part
    matching.pieces.setdefault(target.parameter, []).append(SourcePart(name, part, shape, target))


def _common_part(checkpoint: PreparedCheckpoint, scale: str, weights: list[str], parts: Mapping[str, Slice]) -> Slice:
    """A scale that is a parameter itself follows its weight, or all of its weights alike."""
    wanted = {checkpoint.scale_part(weight, parts[weight]) for weight in weights}
    if len(wanted) > 1:
        raise SliceError(
            f"tensor {scale!r} scales {len(weights)} weights that are cut in different places, so one parameter cannot "
            "hold its part. Let `rename` return None for it: every weight then gets its own part as `.sf`."
        )
    return wanted.pop()


def _choose(by_name: Mapping[str, Slot], matching: _Matching) -> tuple[dict[str, list[SourcePart]], dict[str, str]]:
    """The pieces for each slot, by its first name that has some; other names of the slot are tied to that one."""
    chosen: dict[str, list[SourcePart]] = {}
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, slot in by_name.items():
        if name not in matching.pieces:
            continue
        first = first_names.setdefault(id(slot), name)
        if first == name:
            chosen[name] = matching.pieces[name]
        else:
            tied.update((piece.name, chosen[first][0].name) for piece in matching.pieces[name])
    return chosen, tied


def _planned(
    checkpoint: PreparedCheckpoint,
    by_name: Mapping[str, Slot],
    chosen: Mapping[str, list[SourcePart]],
    problems: list[str],
) -> Iterator[PlannedSlot]:
    slot_of = {piece.name: by_name[name] for name, pieces in chosen.items() for piece in pieces}
    for name, pieces in chosen.items():
        try:
            dtypes = {checkpoint.tensor(piece.name).dtype for piece in pieces}
            if len(dtypes) > 1:
                raise AssemblyError(f"{', '.join(repr(piece.name) for piece in pieces[:3])} have different dtypes")
            value = assemble(pieces, dtypes.pop())
            problem = _mismatch(name, by_name[name].tensor, value)
            if problem:
                problems.append(problem)
                continue
            attachments = attachments_of(checkpoint, value, slot_of)
        except (AssemblyError, SliceError) as error:
            problems.append(f"{name}: {error}.".replace("..", "."))
            continue
        yield PlannedSlot(by_name[name], value, attachments)


def _mismatch(name: str, found: torch.Tensor, value: Assembly) -> str:
    if tuple(found.shape) != value.shape:
        return (
            f"{name}: wrong shape: the model has {list(found.shape)}, the checkpoint gives {list(value.shape)} "
            f"(from {value.sources})."
        )
    if not holds_same_bytes(value.dtype, found.dtype):
        return (
            f"{name}: wrong dtype: the model has {found.dtype}, the checkpoint gives {value.dtype} "
            f"(from {value.sources})."
        )
    return ""


def _missing(by_name: Mapping[str, Slot], chosen: Mapping[str, list[SourcePart]]) -> list[str]:
    filled = {id(by_name[name]) for name in chosen}
    return [name for name, slot in by_name.items() if id(slot) not in filled and name == slot.name]


def _reasons(checkpoint: PreparedCheckpoint, matching: _Matching, missing: list[str], strict: bool) -> Iterator[str]:
    yield f"{checkpoint.folder} does not fit the model."
    yield from matching.problems[:_MOST_NAMES]
    if len(matching.problems) > _MOST_NAMES:
        yield f"And {len(matching.problems) - _MOST_NAMES:,} more of the same kinds."
    if strict and missing:
        yield f"{len(missing):,} missing: no tensor of the checkpoint goes to {list_some(missing, _MOST_NAMES)}."
    if strict and matching.unexpected:
        yield (
            f"{len(matching.unexpected):,} unexpected: the model has no place for "
            f"{list_some(matching.unexpected, _MOST_NAMES)}. "
            "Let `rename` return the parameter's name, or None to leave a tensor out."
        )
    yield "Nothing was loaded."

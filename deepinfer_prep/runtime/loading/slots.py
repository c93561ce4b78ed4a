"""The places of a model that a checkpoint fills: parameters and persistent buffers, each once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_prep.runtime.held_tensors import places


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """A module that holds a tensor of a slot, and under which attribute."""

    module: nn.Module
    attribute: str


@dataclass(slots=True, eq=False)
class Slot:
    """One piece of a model's memory (or one that is still on the meta device), under all of its names.

    Parameters that are one object, and parameters that are several objects over the same memory, are one slot.
    """

    tensors: list[torch.Tensor]
    """The distinct objects."""
    names: list[str]
    owners: list[list[Owner]]
    """For each of `tensors`, everything that holds it."""

    @property
    def tensor(self) -> torch.Tensor:
        """The first of its tensors: all have its shape, dtype and bytes."""
        return self.tensors[0]

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory yet."""
        return self.tensor.is_meta

    def install(self, data: torch.Tensor) -> None:
        """Put a tensor with memory in the place of the slot's own, wherever they are held.

        Class and attributes of a parameter are kept, and `requires_grad` where its dtype allows it.
        """
        for number, owners in enumerate(self.owners):
            new = _with_data(self.tensors[number], data)
            for owner in owners:
                parameters = owner.module._parameters
                held = parameters if owner.attribute in parameters else owner.module._buffers
                held[owner.attribute] = new  # type: ignore[assignment]
            self.tensors[number] = new


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """What a model holds."""

    by_name: Mapping[str, Slot]
    """Every parameter and persistent buffer under every name; tied ones are one slot."""
    computed: Mapping[str, torch.Tensor]
    """Buffers that are not persistent, each under one name: the model computes them itself."""

    def on_meta(self) -> tuple[str, ...]:
        """What has no memory yet, each once: what a checkpoint could fill, under its first name, then the rest."""
        names = [name for name, slot in self.by_name.items() if slot.is_meta and name == slot.name]
        return (*names, *(name for name, tensor in self.computed.items() if tensor.is_meta))


def slots_of(model: nn.Module) -> Slots:
    """The places of a model."""
    by_memory: dict[Hashable, Slot] = {}
    by_name: dict[str, Slot] = {}
    computed: dict[int, tuple[str, torch.Tensor]] = {}
    for place in places(model):
        if not place.loaded:
            computed.setdefault(id(place.tensor), (place.name, place.tensor))
            continue
        slot = by_memory.setdefault(_memory(place.tensor), Slot([], [], []))
        _enter(slot, place.tensor, Owner(place.module, place.attribute))
        slot.names.append(place.name)
        by_name[place.name] = slot
    return Slots(by_name, dict(computed.values()))


def _memory(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same elements of the same storage."""
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _enter(slot: Slot, tensor: torch.Tensor, owner: Owner) -> None:
    for known, owners in zip(slot.tensors, slot.owners, strict=True):
        if known is tensor:
            if not any(one.module is owner.module and one.attribute == owner.attribute for one in owners):
                owners.append(owner)
            return
    slot.tensors.append(tensor)
    slot.owners.append([owner])


def _with_data(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """`data` as what `old` is: a parameter of its class with its attributes, or a plain tensor."""
    if not isinstance(old, nn.Parameter):
        return data
    new = nn.Parameter(data, requires_grad=old.requires_grad and (data.is_floating_point() or data.is_complex()))
    if type(old) is not nn.Parameter:
        new.__class__ = type(old)
    new.__dict__.update(old.__dict__)
    return new

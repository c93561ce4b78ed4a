"""The places of a model that a checkpoint fills: parameters and persistent buffers, each once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_prep.runtime.held_tensors import places


@dataclass(slots=True, eq=False)
class Slot:
    """One tensor of a model, under all of its names."""

    tensor: torch.Tensor
    names: list[str]
    owners: list[tuple[nn.Module, str]]
    """Every module that holds it, and under which attribute."""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory yet."""
        return self.tensor.is_meta

    def install(self, data: torch.Tensor) -> torch.Tensor:
        """Put a tensor with memory in the place of one on the meta device, wherever that is held.

        Class, attributes and `requires_grad` of a parameter are kept.
        """
        new = data
        if isinstance(self.tensor, nn.Parameter):
            new = nn.Parameter(data, requires_grad=self.tensor.requires_grad)
            if type(self.tensor) is not nn.Parameter:
                new.__class__ = type(self.tensor)
            new.__dict__.update(self.tensor.__dict__)
        for module, attribute in self.owners:
            held = module._parameters if attribute in module._parameters else module._buffers
            held[attribute] = new  # type: ignore[assignment]
        self.tensor = new
        return new


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
    by_identity: dict[int, Slot] = {}
    by_name: dict[str, Slot] = {}
    computed: dict[int, tuple[str, torch.Tensor]] = {}
    for place in places(model):
        if not place.loaded:
            computed.setdefault(id(place.tensor), (place.name, place.tensor))
            continue
        slot = by_identity.get(id(place.tensor))
        if slot is None:
            slot = by_identity[id(place.tensor)] = Slot(place.tensor, [], [])
        slot.names.append(place.name)
        if not any(owner is place.module and known == place.attribute for owner, known in slot.owners):
            slot.owners.append((place.module, place.attribute))
        by_name[place.name] = slot
    return Slots(by_name, dict(computed.values()))

"""The places of a model that a checkpoint fills: parameters and persistent buffers, each once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


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
        return self.tensor.device.type == "meta"

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


def slots_of(model: nn.Module) -> Mapping[str, Slot]:
    """Every parameter and persistent buffer under every name; tied ones are one slot."""
    by_identity: dict[int, Slot] = {}
    by_name: dict[str, Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        buffers = {
            name: held for name, held in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for attribute, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is None:
                continue
            slot = by_identity.setdefault(id(tensor), Slot(tensor, [], []))
            name = f"{path}.{attribute}" if path else attribute
            slot.names.append(name)
            if not any(owner is module and held == attribute for owner, held in slot.owners):
                slot.owners.append((module, attribute))
            by_name[name] = slot
    return by_name


def names_on_meta(model: nn.Module) -> tuple[str, ...]:
    """Parameters and buffers that still have no memory, buffers that no checkpoint fills included."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.is_meta
    )

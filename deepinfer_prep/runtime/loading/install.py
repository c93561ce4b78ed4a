"""A load plan carried out: requests for its bytes, and afterwards parameters and attributes put in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deepinfer_prep.runtime.attributes import ATTACHED, BLOCK128_SCALE, HI, KERNEL_SCALE, KERNEL_WEIGHT, LO, SCALE
from deepinfer_prep.runtime.loading.assembly import Assembly, PlacedPart
from deepinfer_prep.runtime.loading.checkpoint import Request
from deepinfer_prep.runtime.loading.plan import LoadPlan, PlannedSlot
from deepinfer_prep.runtime.loading.slices import Slice
from deepinfer_prep.runtime.loading.tensor_file import new_host_tensor

log = logging.getLogger(__name__)

_Pending = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Gives a tensor, from the results of the requests."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingSlot:
    planned: PlannedSlot
    value: _Pending
    attributes: dict[str, _Pending]


class Filling:
    """The requests of a plan; reading them fills what has memory, `install` puts the rest in place.

    A tensor that many weights share is read once.

    Args:
        device: of what replaces tensors on the meta device; requests without `out` are to be read there.
    """

    def __init__(self, plan: LoadPlan, device: torch.device) -> None:
        self.requests: list[Request] = []
        self.nbytes = 0
        """Bytes that the requests fill."""
        self._device = device
        self._shared: dict[tuple[str, Slice, torch.device], _Pending] = {}
        self._slots = [self._pending_slot(planned) for planned in plan.slots]

    def install(self, results: Sequence[torch.Tensor]) -> None:
        """Replace what is on the meta device and attach what belongs to each tensor, once all is read."""
        for pending in self._slots:
            slot = pending.planned.slot
            if slot.is_meta:
                data = pending.value(results)
                slot.install(data if data.dtype == slot.tensor.dtype else data.view(slot.tensor.dtype))
        for pending in self._slots:
            _attach(pending.planned, {name: one(results) for name, one in pending.attributes.items()})

    def _pending_slot(self, planned: PlannedSlot) -> _PendingSlot:
        slot, attachments = planned.slot, planned.attachments
        device = self._device if slot.is_meta else slot.tensor.device
        attributes = {}
        if attachments.scale is not None and attachments.scale_slot is None:
            attributes[SCALE] = self._attachment(attachments.scale, device)
        if attachments.kernel_scale is not None:
            attributes[KERNEL_SCALE] = self._attachment(attachments.kernel_scale, device)
        if attachments.hi_lo is not None:
            for name, half in zip((HI, LO), attachments.hi_lo, strict=True):
                attributes[name] = self._attachment(half, device)
        value = self._request(planned.value, None if slot.is_meta else slot.tensor.detach(), device)
        return _PendingSlot(planned, value, attributes)

    def _attachment(self, assembly: Assembly, device: torch.device) -> _Pending:
        if not assembly.is_single:
            return self._request(assembly, None, device)
        piece = assembly.places[0].piece
        key = (piece.name, piece.part, device)
        if key not in self._shared:
            self._shared[key] = self._request(assembly, None, device)
        return self._shared[key]

    def _request(self, assembly: Assembly, out: torch.Tensor | None, device: torch.device) -> _Pending:
        self.nbytes += assembly.nbytes
        if out is None and assembly.is_single and device == self._device:
            piece, number = assembly.places[0].piece, len(self.requests)
            self.requests.append(Request(piece.name, piece.part))
            return lambda results: results[number]
        whole = _new(assembly, device) if out is None else out
        for place in assembly.places:
            self.requests.append(Request(place.piece.name, place.piece.part, _room(whole, place)))
        return lambda results: whole


def _new(assembly: Assembly, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return new_host_tensor(assembly.shape, assembly.dtype)
    return torch.empty(assembly.shape, dtype=assembly.dtype, device=device)


def _room(whole: torch.Tensor, place: PlacedPart) -> torch.Tensor:
    room = whole[place.at] if place.at else whole
    stored_shape = place.piece.stored_shape
    return room if stored_shape is None else room.view(stored_shape)


def _attach(planned: PlannedSlot, attributes: dict[str, torch.Tensor]) -> None:
    tensor, attachments = planned.slot.tensor, planned.attachments
    for name in ATTACHED:
        tensor.__dict__.pop(name, None)
    if attachments.scale_slot is not None:
        attributes[SCALE] = attachments.scale_slot.tensor
    if attachments.scale_is_kernel_scale:
        attributes[KERNEL_SCALE] = attributes[SCALE].detach().view(torch.uint8)
    if attachments.scale_is_block128:
        attributes[BLOCK128_SCALE] = attributes[SCALE].detach().float()
    if KERNEL_SCALE in attributes or BLOCK128_SCALE in attributes:
        if tensor.is_contiguous():
            attributes[KERNEL_WEIGHT] = tensor.detach().view(torch.uint8)
        else:
            log.warning("%s: no kernel takes it, because it is not row-major in memory", planned.slot.name)
    for name, attribute in attributes.items():
        setattr(tensor, name, attribute)

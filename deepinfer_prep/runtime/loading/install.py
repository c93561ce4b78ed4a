"""A load plan carried out: requests for its bytes, and afterwards parameters and attributes put in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deepinfer_prep.runtime.attributes import (
    ATTACHED,
    BLOCK128_SCALE,
    HI,
    KERNEL_ORDER,
    KERNEL_SCALE,
    KERNEL_WEIGHT,
    LO,
    SCALE,
)
from deepinfer_prep.runtime.held_tensors import keep_loaded_order, keep_loaded_scale
from deepinfer_prep.runtime.loading.assembly import Assembly, PlacedPart, row_axis
from deepinfer_prep.runtime.loading.kernel_order import KernelOrder, reorder
from deepinfer_prep.runtime.loading.plan import LoadPlan, PlannedSlot
from deepinfer_prep.runtime.loading.requests import Request
from deepinfer_prep.runtime.loading.scale_form import AS_STORED, ScaleForm
from deepinfer_prep.runtime.loading.slices import Slice
from deepinfer_prep.runtime.loading.tensor_file import new_host_tensor

log = logging.getLogger(__name__)

_Pending = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Gives a tensor, from the results of the requests."""

_E8M0_ONE = 127


@dataclass(frozen=True, slots=True, eq=False)
class _PendingSlot:
    planned: PlannedSlot
    value: _Pending
    attributes: dict[str, _Pending]


class Filling:
    """The requests of a plan; reading them fills what has memory, `install` puts the rest in place.

    A scale that many weights share is read once.

    Args:
        device: of what replaces tensors on the meta device; requests without `out` are to be read there.
    """

    def __init__(self, plan: LoadPlan, device: torch.device) -> None:
        self.requests: list[Request] = []
        self.nbytes = 0
        """Bytes that the requests fill."""
        self._device = device
        self._values: set[tuple[str, Slice]] = set()
        self._shared: dict[tuple[str, Slice, torch.device], _Pending] = {}
        self._formed: dict[tuple[int, ScaleForm], torch.Tensor] = {}
        self._slots = [self._pending_slot(planned) for planned in plan.slots]

    def install(self, results: Sequence[torch.Tensor]) -> None:
        """Replace what is on the meta device and attach what belongs to each tensor, once all is read."""
        for pending in self._slots:
            slot, data = pending.planned.slot, pending.value(results)
            if pending.planned.kernel_order is not None:
                slot.install(data.view(pending.planned.kernel_order.weight.flat_shape))
                continue
            if pending.planned.is_cast:
                data = data.to(slot.tensor.dtype)
            if slot.is_meta:
                slot.install(data if data.dtype == slot.tensor.dtype else data.view(slot.tensor.dtype))
            elif pending.planned.is_cast:
                slot.tensor.detach().copy_(data)
        for pending in self._slots:
            self._attach(pending.planned, {name: one(results) for name, one in pending.attributes.items()})

    def _pending_slot(self, planned: PlannedSlot) -> _PendingSlot:
        slot, attachments = planned.slot, planned.attachments
        device = self._device if slot.is_meta else slot.tensor.device
        attributes = {}
        if attachments.scale is not None and attachments.scale_slot is None:
            attributes[SCALE] = self._attachment(attachments.scale, device)
        if attachments.kernel_scale is not None:
            attributes[KERNEL_SCALE] = self._attachment(attachments.kernel_scale, device)
        if attachments.hi_lo is not None:
            for name, part in zip((HI, LO), attachments.hi_lo, strict=True):
                attributes[name] = self._attachment(part, device)
        is_filled_in_place = not slot.is_meta and not planned.is_cast
        out = slot.tensor.detach() if is_filled_in_place else None
        if planned.kernel_order is None:
            value = self._value(planned.value, out, device)
        else:
            value = self._in_kernel_order(planned.value, planned.kernel_order, out, device)
        return _PendingSlot(planned, value, attributes)

    def _in_kernel_order(
        self, value: Assembly, order: KernelOrder, out: torch.Tensor | None, device: torch.device
    ) -> _Pending:
        """The bytes of a weight in the kernels' order, uint8 of its shape."""
        if out is not None:
            out = out.view(torch.uint8)
        if order.stored is not None:
            return self._value(order.stored, out, device)
        rows = new_host_tensor(value.shape, torch.uint8)
        read = self._request(value, rows, torch.device("cpu"))

        def reordered(results: Sequence[torch.Tensor]) -> torch.Tensor:
            content = read(results)
            reorder(order.weight, content)
            return content.to(device) if out is None else out.copy_(content)

        return reordered

    def _value(self, assembly: Assembly, out: torch.Tensor | None, device: torch.device) -> _Pending:
        if out is None and assembly.is_single:
            key = assembly.places[0].piece.name, assembly.places[0].piece.part
            # A tensor that goes to two parameters gives each one memory of its own.
            if key in self._values:
                out = _new(assembly, device)
            self._values.add(key)
        return self._request(assembly, out, device)

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
            # The tensor itself, not a view of it, so that what is shared can be recognised.
            return lambda results: results[number] if piece.stored_shape is None else results[number].view(piece.shape)
        whole = _new(assembly, device) if out is None else out
        _pad(whole, assembly)
        for place in assembly.places:
            self.requests.append(Request(place.piece.name, place.piece.part, _room(whole, place)))
        return lambda results: whole

    def _attach(self, planned: PlannedSlot, attributes: dict[str, torch.Tensor]) -> None:
        slot, attachments = planned.slot, planned.attachments
        if attachments.scale_slot is not None:
            attributes[SCALE] = attachments.scale_slot.tensor
        if attachments.scale_is_kernel_scale:
            attributes[KERNEL_SCALE] = attributes[SCALE].detach()
        if KERNEL_SCALE in attributes:
            attributes[KERNEL_SCALE] = attributes[KERNEL_SCALE].view(torch.uint8)
        if attachments.block128 is not None:
            attributes[BLOCK128_SCALE] = attachments.block128.apply(attributes[SCALE], planned.value.shape[:-2])
        if attachments.scale_slot is None and SCALE in attributes:
            attributes[SCALE] = self._in_form(attributes[SCALE], attachments.form)
        order = None if planned.kernel_order is None else planned.kernel_order.weight
        if KERNEL_SCALE in attributes or BLOCK128_SCALE in attributes:
            if order is not None:
                attributes[KERNEL_WEIGHT] = slot.tensor.detach().view(order.shape)
            elif slot.tensor.is_contiguous():
                attributes[KERNEL_WEIGHT] = slot.tensor.detach().view(torch.uint8)
            else:
                log.warning("%s: no kernel takes it, because it is not row-major in memory", slot.name)
        for tensor, owners in zip(slot.tensors, slot.owners, strict=True):
            for name in ATTACHED:
                tensor.__dict__.pop(name, None)
            for name, attribute in attributes.items():
                setattr(tensor, name, attribute)
            if order is not None:
                setattr(tensor, KERNEL_ORDER, order)
            own_scale = None if attachments.scale_slot is not None else attributes.get(SCALE)
            for owner in owners:
                keep_loaded_scale(owner.module, owner.attribute, own_scale)
                keep_loaded_order(owner.module, owner.attribute, order)

    def _in_form(self, scale: torch.Tensor, form: ScaleForm) -> torch.Tensor:
        """The scale in the form asked for; weights that share one share the other as well."""
        if form == AS_STORED:
            return scale
        key = id(scale), form
        if key not in self._formed:
            self._formed[key] = form.apply(scale)
        return self._formed[key]


def _new(assembly: Assembly, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return new_host_tensor(assembly.shape, assembly.dtype)
    return torch.empty(assembly.shape, dtype=assembly.dtype, device=device)


def _pad(whole: torch.Tensor, assembly: Assembly) -> None:
    if assembly.padding is None:
        return
    axis = row_axis(assembly.shape)
    rows = whole.narrow(axis, assembly.padding.start, assembly.shape[axis] - assembly.padding.start)
    if not assembly.padding.is_scale:
        (rows.view(torch.uint8) if rows.element_size() == 1 else rows).zero_()
    elif rows.element_size() == 1:
        rows.view(torch.uint8).fill_(_E8M0_ONE)
    else:
        rows.fill_(1)


def _room(whole: torch.Tensor, place: PlacedPart) -> torch.Tensor:
    room = whole[place.at] if place.at else whole
    stored_shape = place.piece.stored_shape
    return room if stored_shape is None else room.view(stored_shape)

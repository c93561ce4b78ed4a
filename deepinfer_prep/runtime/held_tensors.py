"""Where a quantized weight of a live model keeps its scale, and what kinds of scale there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import stringzilla
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepinfer_prep import fp8
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.runtime.attributes import KERNEL_ORDER, KERNEL_SCALES, LOADED_ORDERS, LOADED_SCALES, SCALE
from deepinfer_prep.runtime.dtypes import FLOAT_NAMES

E8M0_DTYPES = frozenset({torch.float8_e8m0fnu, torch.uint8, torch.int16, torch.int32})
"""Scales of e8m0 bytes: bare, or packed little-endian into words."""


class ModelPlace(NamedTuple):
    """One of the places where a model holds a parameter or buffer."""

    name: str
    """The path of the module, and the attribute."""
    module: nn.Module
    attribute: str
    tensor: torch.Tensor
    loaded: bool
    """Whether a checkpoint fills it: a parameter or a persistent buffer."""


def places(model: nn.Module) -> Iterator[ModelPlace]:
    """Every parameter and buffer of a model under every path that leads to it."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield ModelPlace(prefix + attribute, module, attribute, parameter, True)
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                loaded = attribute not in module._non_persistent_buffers_set
                yield ModelPlace(prefix + attribute, module, attribute, buffer, loaded)


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer of a model, under one of its names."""

    name: str
    tensor: torch.Tensor
    scales: tuple[tuple[str, torch.Tensor], ...]
    """Every scale found for it, by name."""
    loaded: bool
    """Whether a checkpoint fills it: a parameter or a persistent buffer."""
    wrapper: str = ""
    """The tensor subclass that it is a part of, such as torchao's Float8Tensor; empty for one of the model's own."""


def held_tensors(model: nn.Module) -> Iterator[Held]:
    """All parameters and buffers of a model with their scales, each under every name it has.

    Of a tensor subclass that keeps its values in other tensors, these come as well.
    """
    for place in places(model):
        prefix = place.name[: len(place.name) - len(place.attribute)]
        scales = _scales(place.module, place.attribute, place.tensor)
        yield Held(place.name, place.tensor, tuple((prefix + name, scale) for name, scale in scales), place.loaded)
        if place.tensor.dtype != torch.float8_e4m3fn:
            yield from _wrapped(place.name, place.tensor, place.loaded)


def _wrapped(name: str, tensor: torch.Tensor, loaded: bool) -> Iterator[Held]:
    """The tensors that a subclass keeps its values in, each with the parts beside it that are named a scale."""
    if not is_traceable_wrapper_subclass(tensor):
        return
    parts = {attribute: getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0]}
    for attribute, part in parts.items():
        scales = tuple(
            (f"{name}.{other}", scale) for other, scale in parts.items() if "scale" in other and other != attribute
        )
        yield Held(f"{name}.{attribute}", part, scales, loaded, type(tensor).__name__)
        yield from _wrapped(f"{name}.{attribute}", part, loaded)


def main_scale(held: Held) -> torch.Tensor | None:
    """The scale that kernels are prepared from: `.sf`, else a sibling; never one that was prepared before."""
    prepared = [id(getattr(held.tensor, attribute, None)) for attribute in KERNEL_SCALES]
    return next((scale for _, scale in held.scales if id(scale) not in prepared), None)


def _scales(module: nn.Module, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    unscaled = True
    if not hasattr(tensor, SCALE) and isinstance(scale := _loaded_scales(module).get(name), torch.Tensor):
        unscaled = False
        yield f"{name}.{SCALE}", scale
    for attribute in (SCALE, *KERNEL_SCALES):
        if isinstance(scale := getattr(tensor, attribute, None), torch.Tensor):
            unscaled = False
            yield f"{name}.{attribute}", scale
    for sibling in (f"{name}_scale_inv", f"{name}_scale"):
        if (beside := _own_tensor(module, sibling)) is not None:
            unscaled = False
            yield sibling, beside
    # A plain `scale` may be something else (of a norm, of attention), so it counts only where there is no other.
    if unscaled and name == "weight" and (beside := _own_tensor(module, "scale")) is not None:
        yield "scale", beside


def keep_loaded_scale(module: nn.Module, name: str, scale: torch.Tensor | None) -> None:
    """Let a module remember the scale that loading attached to one of its tensors, or forget an earlier one.

    A copy of a parameter, and a parameter wrapped anew, has no attributes; what the module remembers stays with it
    and is copied with it.
    """
    _remember(module, LOADED_SCALES, name, scale)


def keep_loaded_order(module: nn.Module, name: str, order: BandedWeight | None) -> None:
    """Let a module remember that one of its tensors was loaded in the kernels' order, or forget it."""
    _remember(module, LOADED_ORDERS, name, order)


def _remember(module: nn.Module, kind: str, name: str, value: object) -> None:
    known = module.__dict__.get(kind, {})
    if value is not None:
        module.__dict__[kind] = {**known, name: value}
    elif name in known:
        module.__dict__[kind] = {other: kept for other, kept in known.items() if other != name}


def restore_loaded(model: nn.Module) -> None:
    """Attach the scales and orders that modules remember to those of their tensors that have lost theirs."""
    for place in places(model):
        order = _loaded_orders(place.module).get(place.attribute)
        if order is not None and place.tensor.dtype == torch.uint8 and place.tensor.shape == order.flat_shape:
            setattr(place.tensor, KERNEL_ORDER, order)
        scale = _loaded_scales(place.module).get(place.attribute)
        if scale is not None and not hasattr(place.tensor, SCALE):
            setattr(place.tensor, SCALE, scale.to(place.tensor.device))


def _loaded_scales(module: nn.Module) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = module.__dict__.get(LOADED_SCALES, {})
    return found


def _loaded_orders(module: nn.Module) -> Mapping[str, BandedWeight]:
    found: Mapping[str, BandedWeight] = module.__dict__.get(LOADED_ORDERS, {})
    return found


def _own_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    # Not getattr, which would run the module's properties.
    for place in (module._parameters, module._buffers, module.__dict__):
        if isinstance(found := place.get(name), torch.Tensor):
            return found
    return None


def kind(scale: torch.Tensor) -> str | None:
    """What its elements are: "E8M0", a name of `FLOAT_NAMES`, or None for no known form of a scale."""
    return "E8M0" if scale.dtype in E8M0_DTYPES else FLOAT_NAMES.get(scale.dtype)


def problem(codes: fp8.U8, kind_of_scale: str, doubled: bool) -> str | None:
    """What makes some bytes of a scale unusable, in words: NaN, infinity, or values without a finite double.

    Args:
        doubled: whether they are to be doubled; otherwise it is enough that they are finite.
    """
    if doubled:
        try:
            fp8.double(codes, kind_of_scale, np.empty_like(codes))
        except fp8.NoExactResultError as error:
            return f"an element {error.problem}"
        return None
    if kind_of_scale == "E8M0":
        return "holds the e8m0 byte 255 (NaN)" if stringzilla.find(codes.data, b"\xff") >= 0 else None
    return None if np.isfinite(fp8.widen(codes, kind_of_scale)).all() else "holds NaN or infinity"

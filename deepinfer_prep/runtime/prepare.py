"""What the kernels take, attached to the weights of a model in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.kernel_scale import NoKernelScaleError
from deepinfer_prep.runtime import held_tensors, kernel_scales, neuron, settings
from deepinfer_prep.runtime.attributes import (
    BLOCK128_SCALE,
    KERNEL_ORDER,
    KERNEL_SCALE,
    KERNEL_SCALES,
    KERNEL_WEIGHT,
)
from deepinfer_prep.runtime.rescaling.byte_spans import spans_of
from deepinfer_prep.runtime.rescaling.rescale import holds_above_240

log = logging.getLogger(__name__)

FP4_DTYPES = (torch.int8, torch.float4_e2m1fn_x2)


def prepare_model(model: nn.Module) -> int:
    """Attach kernel scales and byte views to every e4m3 and fp4 weight whose scales fit the kernels.

    e4m3 weights are float8_e4m3fn [n, k] or [e, n, k], fp4 weights int8 [n, k/2] or [e, n, k/2] with two e2m1
    values a byte. A weight gets `_nki_weight`, its bytes as a uint8 tensor over the same memory, and either
    `_nki_scale`, uint8 e8m0 [..., ceil(n/32), ceil(k/32)] (fp4: [..., n, k/32]), or, where its scales stand for
    128x128 blocks and are no powers of two, `_nki_block_scale`, float32 [..., ceil(n/128), ceil(k/128)].

    A weight that was loaded in the kernels' order is uint8 and has `_nki_order`; it gets the same, with the shape that
    its order states.

    Scales are found as `rescale_fp8_weights` finds them. Weights that get none are logged with the reason. Call
    it after rescaling, after moving the model to its device, after copying the model or wrapping its parameters anew
    (which drops attributes; the `.sf` of a weight that `load_weights` filled is attached again), and when weights
    were loaded anew.
    Does nothing with `DEEPINFER_NEURON_FP8_MAX=448`: kernels read the hardware's e4m3.

    Returns:
        How many weights are prepared.

    Raises:
        RefusedError: e4m3 weights hold codes above 240, which kernels would read as infinity or NaN.
    """
    if settings.leaves_e4m3fn():
        return 0
    held_tensors.restore_loaded(model)
    prepared, above_240, reasons = 0, [], dict[str, list[str]]()
    for held in _quantized_weights(model):
        try:
            if _holds_above_240(held.tensor):
                above_240.append(held.name)
            else:
                _attach_main_scale(held)
            prepared += 1
        except NoKernelScaleError as error:
            reasons.setdefault(str(error), []).append(held.name)
    if above_240:
        raise RefusedError(_above_240_refusal(above_240))
    for reason, names in reasons.items():
        log.warning("no kernel for %d weights, %s among them: %s", len(names), names[0], reason)
    return prepared


def attach(weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Attach `_nki_weight` and the kernel scale that follows from `scale` to one weight.

    Raises:
        NoKernelScaleError: the weight or its scale is of no form that a kernel takes.
    """
    for attribute in (KERNEL_WEIGHT, *KERNEL_SCALES):
        if hasattr(weight, attribute):
            delattr(weight, attribute)
    order = order_of(weight)
    content = weight if order is None else weight.detach().view(order.shape)
    if content.dim() not in (2, 3) or content.numel() == 0:
        raise NoKernelScaleError(f"a weight of shape {list(weight.shape)} is no matrix or stack of matrices")
    if not weight.is_contiguous():
        raise NoKernelScaleError("the weight is not row-major in memory, and a copy would not be the same storage")
    is_fp4 = weight.dtype in FP4_DTYPES if order is None else order.content == "e2m1"
    derive = kernel_scales.e2m1_scales if is_fp4 else kernel_scales.e4m3_scales
    found = derive(content, scale)
    setattr(weight, KERNEL_WEIGHT, content.detach().view(torch.uint8))
    if found.e8m0 is not None:
        setattr(weight, KERNEL_SCALE, found.e8m0)
    else:
        setattr(weight, BLOCK128_SCALE, found.block128)


def order_of(weight: torch.Tensor) -> BandedWeight | None:
    """What says of a weight that its bytes stand in the kernels' order; None for any other tensor."""
    order: BandedWeight | None = getattr(weight, KERNEL_ORDER, None)
    return order


def _attach_main_scale(held: held_tensors.Held) -> None:
    """Attach what follows from a weight's scale; nothing where the weight came prepared."""
    if held.wrapper:
        raise NoKernelScaleError(
            f"it lies inside a {held.wrapper}, which computes by its own rules; use a plain tensor"
        )
    scale = held_tensors.main_scale(held)
    if scale is not None:
        attach(held.tensor, scale)


def _quantized_weights(model: nn.Module) -> Iterator[held_tensors.Held]:
    """Every e4m3 and fp4 weight that has a scale, once."""
    seen = set()
    for held in held_tensors.held_tensors(model):
        weight = held.tensor
        is_quantized = weight.dtype in (torch.float8_e4m3fn, *FP4_DTYPES) or order_of(weight) is not None
        if not is_quantized or not held.scales or id(weight) in seen:
            continue
        seen.add(id(weight))
        yield held


def _holds_above_240(weight: torch.Tensor) -> bool:
    if weight.device.type == "meta":
        raise NoKernelScaleError("the weight is on the meta device; load it first")
    order = order_of(weight)
    is_e4m3 = weight.dtype == torch.float8_e4m3fn if order is None else order.content == "e4m3"
    if not is_e4m3 or not holds_above_240(spans_of(weight)):
        return False
    if neuron.computes_in_e4m3():
        return True
    raise NoKernelScaleError(f"the kernels read e4m3 up to 240, and on {neuron.chip()} weights keep e4m3fn codes above")


def _above_240_refusal(names: list[str]) -> str:
    return (
        f"{len(names)} fp8 weights hold codes above 240, {names[0]} among them: kernels would read those as infinity "
        "or NaN. Call rescale_fp8_weights(model) first, or load a prepared checkpoint."
    )

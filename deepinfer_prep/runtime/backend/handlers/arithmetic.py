"""Operations that read fp8 values: reductions, comparisons and the scaled product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_prep.runtime.backend import codecs
from deepinfer_prep.runtime.backend.byte_formats import carried
from deepinfer_prep.runtime.backend.calls import Call, order_arguments
from deepinfer_prep.runtime.backend.emitter import Emitter
from deepinfer_prep.runtime.backend.encoded_numbers import round_number
from deepinfer_prep.runtime.backend.handlers.conversions import converted, decoded, decoded_from, encoded


def reduce(emitter: Emitter, call: Call) -> Any:
    """A reduction that asks for a float type: decode to it, then reduce."""
    dtype = call.arguments.get("dtype")
    if dtype is None or carried(dtype) is not None:
        raise emitter.refusal("it would reduce in fp8; give it dtype=torch.float32", call.func)
    value = call.run()
    source = call.arguments["self"]
    node = decoded(emitter, emitter.node_of(source), source, dtype)
    args, kwargs = order_arguments(call.func, {**call.arguments, "self": node})
    emitter.bind(value, emitter.emit(call.func, args, kwargs, value))
    return value


def compare(emitter: Emitter, call: Call) -> Any:
    """A comparison or predicate: on the values, in the type that torch compares in."""
    value = call.run()
    names = [name for name in ("self", "other") if name in call.arguments]
    tensors = [call.arguments[name] for name in names if isinstance(call.arguments[name], Tensor)]
    common = _comparison_dtype(emitter, call, tensors)
    arguments = dict(call.arguments)
    for name in names:
        arguments[name] = _compared(emitter, call, arguments[name], common)
    args, kwargs = order_arguments(call.func, arguments)
    emitter.bind(value, emitter.emit(call.func, args, kwargs, value))
    return value


def _comparison_dtype(emitter: Emitter, call: Call, tensors: list[Tensor]) -> torch.dtype:
    """The type torch promotes the operands to: a tensor with dimensions outweighs one without."""
    shaped = {tensor.dtype for tensor in tensors if tensor.dim() > 0} or {tensor.dtype for tensor in tensors}
    common = next(iter(shaped))
    scalars = {tensor.dtype for tensor in tensors} - shaped
    if len(shaped) > 1 or any(_outweighs(dtype, common) for dtype in scalars):
        names = sorted(str(tensor.dtype) for tensor in tensors)
        raise emitter.refusal(
            f"it compares {' with '.join(names)}, and torch does not promote fp8 types; convert one of them",
            call.func,
        )
    return common


def _outweighs(scalar: torch.dtype, common: torch.dtype) -> bool:
    """Whether a 0-dim tensor's type is of a higher category than that of the tensor it meets."""

    def category(dtype: torch.dtype) -> int:
        return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0

    return category(scalar) > category(common)


def _compared(emitter: Emitter, call: Call, operand: Any, common: torch.dtype) -> Any:
    """An operand rounded to the common type and, where that is fp8, decoded again."""
    fmt = carried(common)
    if not isinstance(operand, Tensor):
        if fmt is None:
            return operand
        if isinstance(operand, (bool, int, float)):
            return round_number(operand, fmt)
        raise emitter.refusal(f"it compares fp8 values with {operand!r}", call.func)
    node = converted(emitter, operand, common) if operand.dtype != common else emitter.node_of(operand)
    if fmt is None:
        return node
    return decoded_from(emitter, node, operand, fmt)


def matmul(emitter: Emitter, call: Call) -> Any:
    """torch._scaled_mm with one scale for each operand."""
    arguments = call.arguments
    scales = [arguments["scale_a"], arguments["scale_b"]]
    if any(scale.numel() != 1 for scale in scales) or arguments.get("scale_result") is not None:
        raise emitter.refusal(
            "only one scale per operand and no scale_result is supported; decode the operands, multiply and "
            "scale the product instead",
            call.func,
        )
    value = call.run()
    operands = [arguments["self"], arguments["mat2"]]
    nodes = [
        converted(emitter, operand, torch.float32) if operand.dtype != torch.float32 else emitter.node_of(operand)
        for operand in operands
    ]
    nodes += [emitter.node_of(scale) for scale in scales]
    bias = arguments.get("bias")
    fmt = carried(value)
    dtype = torch.float32 if fmt is not None else value.dtype
    product = torch.empty_like(value, dtype=dtype)
    args = (*nodes, None if bias is None else emitter.node_of(bias), dtype)
    node = emitter.emit(codecs.scaled_mm, args, {}, product)
    emitter.bind(value, node if fmt is None else encoded(emitter, node, product, fmt))
    return value

"""Operations that read fp8 values: reductions, comparisons and the scaled product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

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


def assert_metadata(emitter: Emitter, call: Call) -> None:
    """What an exported program states of a tensor: torch has checked it on the fake tensor, and it is dropped."""
    call.run()


def matmul(emitter: Emitter, call: Call) -> Any:
    """A product of two fp8 matrices: summed in float32 and rounded once, as torch's CPU kernel does.

    That kernel starts its sums at 0, so that none is -0; a product in float32 need not.
    """
    value = call.run()
    operands = (call.arguments["self"], call.arguments["mat2"])
    nodes = tuple(_in_float32(emitter, operand) for operand in operands)
    fmt = carried(value)
    if fmt is None:
        raise emitter.refusal(f"it multiplies {operands[0].dtype} with {operands[1].dtype}", call.func)
    product = torch.empty_like(value, dtype=torch.float32)
    node = emitter.emit(call.func, nodes, {}, product)
    is_zero = emitter.emit(torch.ops.aten.eq.Scalar, (node, 0.0), {}, torch.empty_like(value, dtype=torch.bool))
    node = emitter.emit(torch.ops.aten.masked_fill.Scalar, (node, is_zero, 0.0), {}, product)
    emitter.bind(value, encoded(emitter, node, product, fmt))
    return value


def scaled_matmul(emitter: Emitter, call: Call) -> Any:
    """torch._scaled_mm and its second version, with one scale an operand, or one a row of the result and a column."""
    arguments = call.arguments
    if call.func is _SCALED_MM_V2:
        arguments = _first_version(emitter, call)
    scales = [arguments["scale_a"], arguments["scale_b"]]
    value = call.run()
    if arguments.get("scale_result") is not None or not _are_supported(scales, value):
        raise emitter.refusal(
            "only one scale for each operand, or one for each row of the first and each column of the second, is "
            "supported, and no scale_result; decode the operands, multiply and scale the product instead",
            call.func,
        )
    nodes = [_in_float32(emitter, arguments[name]) for name in ("self", "mat2")]
    nodes += [emitter.node_of(scale) for scale in scales]
    bias = arguments.get("bias")
    fmt = carried(value)
    dtype = torch.float32 if fmt is not None else value.dtype
    product = torch.empty_like(value, dtype=dtype)
    args = (*nodes, None if bias is None else emitter.node_of(bias), dtype)
    node = emitter.emit(codecs.scaled_mm, args, {}, product)
    emitter.bind(value, node if fmt is None else encoded(emitter, node, product, fmt))
    return value


_SCALED_MM_V2 = getattr(torch.ops.aten, "_scaled_mm_v2", torch.ops.aten._scaled_mm).default
_TENSOR_WISE, _ROW_WISE = 0, 1
"""Members of torch.nn.functional.ScalingType."""


def _first_version(emitter: Emitter, call: Call) -> dict[str, Any]:
    """The arguments of _scaled_mm_v2 as those of _scaled_mm."""
    arguments = dict(call.arguments)
    recipes = {*arguments.pop("recipe_a"), *arguments.pop("recipe_b")}
    swizzled = any((*arguments.pop("swizzle_a"), *arguments.pop("swizzle_b")))
    if len(arguments["scale_a"]) != 1 or len(arguments["scale_b"]) != 1 or recipes - {_TENSOR_WISE, _ROW_WISE}:
        raise emitter.refusal("only scales by tensor and by row are supported, not by blocks", call.func)
    if swizzled or arguments.pop("contraction_dim", None):
        raise emitter.refusal("swizzled scales and a contraction_dim are not supported", call.func)
    return {**arguments, "scale_a": arguments["scale_a"][0], "scale_b": arguments["scale_b"][0]}


def _are_supported(scales: Sequence[Tensor], product: Tensor) -> bool:
    rows, columns = product.shape
    shapes = [tuple(scale.shape) for scale in scales]
    return all(scale.numel() == 1 for scale in scales) or shapes == [(rows, 1), (1, columns)]


def _in_float32(emitter: Emitter, operand: Tensor) -> Node:
    if operand.dtype == torch.float32:
        return emitter.node_of(operand)
    return converted(emitter, operand, torch.float32)

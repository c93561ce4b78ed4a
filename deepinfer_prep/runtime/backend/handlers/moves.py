"""Operations that move bytes, and those that store a number while they do."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from deepinfer_prep.runtime.backend.byte_formats import CARRIER, ByteFormat, carried
from deepinfer_prep.runtime.backend.calls import Call, order_arguments, overload
from deepinfer_prep.runtime.backend.emitter import Emitter
from deepinfer_prep.runtime.backend.encoded_numbers import encode_number, round_number
from deepinfer_prep.runtime.backend.handlers.conversions import converted
from deepinfer_prep.runtime.backend.node_values import map_tensors
from deepinfer_prep.runtime.backend.operations import OPERATIONS, Row


def move(emitter: Emitter, call: Call) -> Any:
    """The same operation on bytes, with numbers and foreign tensors encoded where they are stored."""
    for name, wanted, reason in call.row.require:
        if call.arguments.get(name, wanted) != wanted:
            raise emitter.refusal(reason, call.func)
    if call.row.absolute and emitter.scope.is_moved(call.arguments["self"]):
        raise emitter.refusal(_ABSOLUTE, call.func)
    value = call.run()
    first = next(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    func, arguments = _with_stored_number(call, carried(first))
    arguments = {
        name: _moved_argument(emitter, call, name, argument, first.dtype) for name, argument in arguments.items()
    }
    args, kwargs = order_arguments(func, arguments)
    emitter.bind(value, emitter.emit(func, args, kwargs, value))
    return value


def split(emitter: Emitter, call: Call) -> Any:
    """Pieces along a dimension, one slice or element each.

    AOT takes the pieces of an operation with several results out of their source by its strides, which are
    not those of what a compiler for the device computes.
    """
    pieces = call.run()
    node, dim = emitter.node_of(call.arguments["self"]), call.arguments.get("dim", 0)
    start = 0
    for index, piece in enumerate(pieces):
        if call.func is _UNBIND:
            emitter.bind(piece, emitter.emit(_SELECT, (node, dim, index), {}, piece))
        else:
            end = start + piece.shape[dim]
            emitter.bind(piece, emitter.emit(_SLICE, (node, dim, start, end), {}, piece))
            start = end
    return pieces


def same(emitter: Emitter, call: Call) -> Any:
    """detach: bytes carry no gradient, and the compiler's search for written inputs stops at it."""
    value = call.run()
    emitter.bind(value, emitter.node_of(call.arguments["self"]))
    return value


def bitcast(emitter: Emitter, call: Call) -> Any:
    """view(dtype): fp8 and uint8 are the same bytes; any other type is a view of the uint8 tensor."""
    source, dtype = call.arguments["self"], call.arguments["dtype"]
    value = call.run()
    node = emitter.node_of(source)
    emitted = CARRIER if carried(dtype) is not None else dtype
    held = CARRIER if carried(source) is not None else source.dtype
    if emitted != held:
        node = emitter.emit(call.func, (node, emitted), {}, value)
    emitter.bind(value, node)
    return value


_UNBIND = torch.ops.aten.unbind.int
_SELECT = torch.ops.aten.select.int
_SLICE = torch.ops.aten.slice.Tensor
_ABSOLUTE = (
    "it addresses the storage of a graph input that is itself a view, or shares its storage with another input; "
    "use slices, or pass the tensor that the input is a view of"
)


def round_stored_number(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `x[index] = number` on an fp8 tensor with the number rounded to what x can hold.

    torch makes a tensor of the number before anything is dispatched; a number that fp8 holds survives that
    whatever torch's own rule for overflow is.
    """
    fmt = carried(args[0]) if node.target is operator.setitem else None
    if fmt is None or not isinstance(args[2], (bool, int, float)):
        return args
    return (*args[:2], round_number(args[2], fmt))


def _with_stored_number(call: Call, fmt: ByteFormat | None) -> tuple[OpOverload, dict[str, Any]]:
    """The operation that names the number it stores, where the original only implies it."""
    if fmt is None or call.row.implied is None:
        return call.func, dict(call.arguments)
    number, name = call.row.implied
    value_name = OPERATIONS[name].value
    assert value_name is not None, f"{name} must name the value that it stores"
    return overload(name), {**call.arguments, value_name: number}


def _moved_argument(emitter: Emitter, call: Call, name: str, argument: Any, dtype: torch.dtype) -> Any:
    """One argument of a move whose result has type `dtype`, as the emitted call takes it."""
    row = call.row
    fmt = carried(dtype)
    stored = row.value or (OPERATIONS[row.implied[1]].value if row.implied else None)
    if name == stored and fmt is not None:
        return _stored_value(emitter, call, argument, fmt)
    if name == "dtype" and carried(argument) is not None:
        return CARRIER
    if name in row.shape_only:
        return map_tensors(emitter.node_of, argument)

    def convert(tensor: Tensor) -> Node:
        if tensor.dtype == dtype or (carried(tensor) is None and not _is_stored(row, name)):
            return emitter.node_of(tensor)
        if name in row.cast or (name in row.cast_scalar and tensor.dim() == 0):
            return converted(emitter, tensor, dtype)
        raise emitter.refusal(_mismatch(name, tensor.dtype, dtype), call.func)

    return map_tensors(convert, argument)


def _is_stored(row: Row, name: str) -> bool:
    return name in row.data or name in row.cast or name in row.cast_scalar


def _stored_value(emitter: Emitter, call: Call, value: Any, fmt: ByteFormat) -> Any:
    """A number or a 0-dim tensor that is stored as fp8: its byte, or a node for it."""
    if isinstance(value, Tensor):
        return converted(emitter, value, fmt.dtype)
    if isinstance(value, (bool, int, float)):
        return encode_number(value, fmt)
    raise emitter.refusal(f"it stores {value!r}, which is not a real number, as {fmt.dtype}", call.func)


def _mismatch(name: str, found: torch.dtype, expected: torch.dtype) -> str:
    return (
        f"argument '{name}' is {found} where the result is {expected}, and torch does not promote fp8 types; "
        f"convert it with .to({expected})"
    )

"""Replays one node on fake tensors and rewrites every operation that torch dispatches for it.

Whatever a node was written as (function, method, operator, keywords, setitem, a composite of several
operations), what reaches the dispatcher is a short list of overloads; each has a row in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_prep.runtime.backend.calls import Call, bind_arguments, unknown_reason
from deepinfer_prep.runtime.backend.declarations import declaration_of
from deepinfer_prep.runtime.backend.emitter import Emitter
from deepinfer_prep.runtime.backend.handlers.arithmetic import assert_metadata, compare, matmul, reduce, scaled_matmul
from deepinfer_prep.runtime.backend.handlers.conversions import convert
from deepinfer_prep.runtime.backend.handlers.custom_operations import call_declared
from deepinfer_prep.runtime.backend.handlers.moves import bitcast, move, round_stored_number, same, split
from deepinfer_prep.runtime.backend.node_values import (
    holds_carried,
    leaves,
    logical_value,
    map_tensors,
    refused_reason,
)
from deepinfer_prep.runtime.backend.operations import OPERATIONS, Kind

_DETACH = torch.ops.aten.detach.default
_CONSTANT_MAKERS = {"aten.scalar_tensor.default": "s", "aten.full.default": "fill_value"}


HANDLERS: Mapping[Kind, Callable[[Emitter, Call], Any]] = {
    Kind.SAME: same,
    Kind.MOVE: move,
    Kind.SPLIT: split,
    Kind.FILL: move,
    Kind.CONVERT: convert,
    Kind.BITCAST: bitcast,
    Kind.REDUCE: reduce,
    Kind.COMPARE: compare,
    Kind.MATMUL: matmul,
    Kind.SCALED: scaled_matmul,
    Kind.ASSERT: assert_metadata,
}
"""Which handler writes which kind of operation on bytes.

A handler runs the operation on the fake values of the user's program, emits nodes that compute the same on
bytes, and returns what the operation returned.
"""


class Rewriter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs one old node on fake values and hands each dispatched operation to its handler."""

    def __init__(self, emitter: Emitter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.emitter = emitter
        self.touched = False
        """Whether an fp8 value occurred in any operation so far."""

    def replay(self) -> Any:
        """Run the old node on fake values. Returns its result; the emitter's `tree_of` has the nodes for it."""
        node, scope = self.emitter.node, self.emitter.scope
        args = round_stored_number(node, torch.fx.node.map_arg(node.args, logical_value))
        kwargs = torch.fx.node.map_arg(node.kwargs, logical_value)
        with scope.fake_mode, torch.no_grad(), self:
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            if node.op == "call_module":
                return scope.module.get_submodule(str(node.target))(*args, **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, such as its device
            return func(*args, **kwargs)
        reason = refused_reason((args, kwargs))
        if reason is not None:
            raise self.emitter.refusal(reason, func)
        if holds_carried((args, kwargs)):
            self.touched = True
            return self._touched_operation(func, args, kwargs)
        return self._plain_operation(func, args, kwargs)

    def _touched_operation(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = OPERATIONS.get(str(func))
        declaration = declaration_of(func) if row is None else None
        if row is None and declaration is None and _decomposes(func):
            with self:
                return func.decompose(*args, **kwargs)
        if any(_is_dynamic(leaf) for leaf in leaves((args, kwargs))):
            raise self.emitter.refusal(_DYNAMIC, func)
        if declaration is not None:
            return call_declared(self.emitter, func, declaration, args, kwargs)
        if row is None:
            raise self.emitter.refusal(unknown_reason(func), func)
        if row.kind is Kind.REFUSE:
            raise self.emitter.refusal(row.reason, func)
        value = HANDLERS[row.kind](self.emitter, Call(func, row, bind_arguments(func, args, kwargs)))
        if any(_is_dynamic(leaf) for leaf in leaves(value)):
            raise self.emitter.refusal(_DYNAMIC, func)
        return value

    def _plain_operation(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = func(*args, **kwargs)
        if holds_carried(value):
            self.touched = True
            declaration = declaration_of(func)
            if declaration is None:
                raise self.emitter.refusal(unknown_reason(func), func)
            return call_declared(self.emitter, func, declaration, args, kwargs)
        if func is _DETACH and not args[0].requires_grad:
            self.emitter.bind(value, self.emitter.node_of(args[0]))
            return value
        new_args, new_kwargs = map_tensors(self.emitter.node_of, (args, kwargs))
        self.emitter.bind(value, self.emitter.emit(func, new_args, new_kwargs, value))
        self._note_number(func, args, kwargs, value)
        return value

    def _note_number(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """Remember the number that a 0-dim tensor was made of; forget that of one that is written to."""
        if func._schema.is_mutable:
            self.emitter.numbers.pop(id(args[0]), None)
        name = _CONSTANT_MAKERS.get(str(func))
        if name is not None and value.dim() == 0:
            number = bind_arguments(func, args, kwargs)[name]
            if isinstance(number, (int, float)):
                self.emitter.numbers[id(value)] = float(number)


_DYNAMIC = (
    "one of its sizes, indices or numbers is known only at run time; use a tensor of fixed size instead, for "
    "instance with torch.where or index_put"
)


def _is_dynamic(leaf: Any) -> bool:
    if isinstance(leaf, FakeTensor):
        return bool(leaf._has_symbolic_sizes_strides)
    return isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _decomposes(func: OpOverload) -> bool:
    """Whether torch defines an operation by others (it is seen whole only in inference mode)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(str(func._name), "CompositeImplicitAutograd")

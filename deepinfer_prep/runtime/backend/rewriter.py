"""Replays one node on fake tensors and rewrites every operation that torch dispatches for it.

Whatever a node was written as (function, method, operator, keywords, setitem, a composite of several
operations), what reaches the dispatcher is a short list of overloads; each has a row in the table.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_prep.runtime.backend.calls import Call, bind_arguments, unknown_reason
from deepinfer_prep.runtime.backend.declarations import declaration_of
from deepinfer_prep.runtime.backend.errors import LegalizationError
from deepinfer_prep.runtime.backend.handlers.custom_operations import call_declared
from deepinfer_prep.runtime.backend.handlers.moves import round_stored_number
from deepinfer_prep.runtime.backend.node_values import (
    holds_carried,
    leaves,
    logical_value,
    map_tensors,
    operation_name,
    refuse,
    refused_reason,
)
from deepinfer_prep.runtime.backend.operations import OPERATIONS, Kind
from deepinfer_prep.runtime.backend.rules import HANDLERS
from deepinfer_prep.runtime.backend.scope import Scope

_DETACH = torch.ops.aten.detach.default
_CONSTANT_MAKERS = {"aten.scalar_tensor.default": "s", "aten.full.default": "fill_value"}


class Rewriter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Emits the new nodes for one old node.

    Tensors are recognised by identity: the fake values of the old node's inputs, and those that the
    operations replayed so far have returned.
    """

    def __init__(self, scope: Scope, node: Node) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scope = scope
        self.node = node
        self.numbers: dict[int, float] = {}
        """Numbers held by 0-dim tensors that the replay made, by the tensor's id."""
        self.touched = False
        """Whether an fp8 value occurred in any operation so far."""
        self._nodes: dict[int, Node] = {}
        self._kept_alive: list[Tensor] = []
        self._emitted: list[Node] = []
        for source in node.all_input_nodes:
            self.bind(logical_value(source), scope.carriers(source))

    def bind(self, value: Any, carriers: Any) -> None:
        """Let nodes stand for a fake value; a tensor that is known already keeps its node."""
        if isinstance(value, Tensor):
            if id(value) not in self._nodes:
                self._nodes[id(value)] = carriers
                self._kept_alive.append(value)
        elif isinstance(value, (list, tuple)) and isinstance(carriers, (list, tuple)):
            for part, carrier in zip(value, carriers, strict=True):
                self.bind(part, carrier)

    def node_of(self, tensor: Tensor) -> Node:
        """The new node that stands for a tensor of the replay."""
        known = self._nodes.get(id(tensor))
        if known is not None:
            return known
        if isinstance(tensor, FakeTensor):
            raise self.refusal("it uses a tensor that does not come from the operation's arguments")
        node = self.scope.add_constant(tensor, self.node)
        self.bind(tensor, node)
        return node

    def tree_of(self, value: Any) -> Any:
        """The new nodes that stand for a nested result."""
        return map_tensors(self.node_of, value)

    def emit(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> Any:
        """Add a call whose tensors are already nodes. Returns nodes nested as `value` is."""
        node = self.scope.graph.call_function(target, tuple(args), dict(kwargs))
        self._emitted.append(node)
        self.scope.describe(node, self.node, value)
        if not isinstance(value, (list, tuple)):
            return node
        return [self.emit(operator.getitem, (node, i), {}, part) for i, part in enumerate(value)]

    def retract(self) -> None:
        """Erase everything that was emitted."""
        for node in reversed(self._emitted):
            self.scope.graph.erase_node(node)

    def refusal(self, reason: str, func: OpOverload | None = None) -> LegalizationError:
        """The error for the old node, naming the operation that torch dispatched if it adds something."""
        name = operation_name(self.node)
        if func is not None and str(func) not in name:
            name = f"{name} ({func})"
        return refuse(self.node, reason, operation=name)

    def replay(self) -> Any:
        """Run the old node on fake values. Returns its result; nodes for it are in `tree_of`."""
        args = round_stored_number(self.node, torch.fx.node.map_arg(self.node.args, logical_value))
        kwargs = torch.fx.node.map_arg(self.node.kwargs, logical_value)
        with self.scope.fake_mode, torch.no_grad(), self:
            if self.node.op == "call_method":
                return getattr(args[0], str(self.node.target))(*args[1:], **kwargs)
            if self.node.op == "call_module":
                return self.scope.module.get_submodule(str(self.node.target))(*args, **kwargs)
            return self.node.target(*args, **kwargs)  # type: ignore[operator]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, such as its device
            return func(*args, **kwargs)
        reason = refused_reason((args, kwargs))
        if reason is not None:
            raise self.refusal(reason, func)
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
            raise self.refusal(_DYNAMIC, func)
        if declaration is not None:
            return call_declared(self, func, declaration, args, kwargs)
        if row is None:
            raise self.refusal(unknown_reason(func), func)
        if row.kind is Kind.REFUSE:
            raise self.refusal(row.reason, func)
        value = HANDLERS[row.kind](self, Call(func, row, bind_arguments(func, args, kwargs)))
        if any(_is_dynamic(leaf) for leaf in leaves(value)):
            raise self.refusal(_DYNAMIC, func)
        return value

    def _plain_operation(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = func(*args, **kwargs)
        if holds_carried(value):
            self.touched = True
            declaration = declaration_of(func)
            if declaration is None:
                raise self.refusal(unknown_reason(func), func)
            return call_declared(self, func, declaration, args, kwargs)
        if func is _DETACH and not args[0].requires_grad:
            self.bind(value, self.node_of(args[0]))
            return value
        self.bind(value, self.emit(func, map_tensors(self.node_of, args), map_tensors(self.node_of, kwargs), value))
        self._note_number(func, args, kwargs, value)
        return value

    def _note_number(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """Remember the number that a 0-dim tensor was made of; forget that of one that is written to."""
        if func._schema.is_mutable:
            self.numbers.pop(id(args[0]), None)
        name = _CONSTANT_MAKERS.get(str(func))
        if name is not None and value.dim() == 0:
            number = bind_arguments(func, args, kwargs)[name]
            if isinstance(number, (int, float)):
                self.numbers[id(value)] = float(number)


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

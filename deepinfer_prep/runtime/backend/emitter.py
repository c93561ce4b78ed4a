"""Writes the new nodes for one old node, and knows which new node stands for which fake tensor."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from deepinfer_prep.errors import LegalizationError
from deepinfer_prep.runtime.backend.node_values import logical_value, map_tensors, operation_name, refuse, whole_tensor
from deepinfer_prep.runtime.backend.scope import Scope


class Emitter:
    """What handlers see of a rewriting: they ask for nodes of tensors, emit new ones, and refuse.

    Tensors are recognised by identity: the fake values of the old node's inputs, and those that the
    operations replayed so far have returned.
    """

    def __init__(self, scope: Scope, node: Node) -> None:
        self.scope = scope
        self.node = node
        self.numbers: dict[int, float] = {}
        """Numbers held by 0-dim tensors that the replay made, by the tensor's id."""
        self._nodes: dict[int, Node] = {}
        self._kept_alive: list[Tensor] = []
        self._emitted: list[Node] = []
        for source in node.all_input_nodes:
            self.bind(logical_value(source), scope.carriers(source))

    def bind(self, value: Any, carriers: Any) -> None:
        """Let nodes stand for a fake value; a tensor that is known already keeps its node."""
        if isinstance(value, Tensor):
            value = whole_tensor(value)
            if id(value) not in self._nodes:
                self._nodes[id(value)] = carriers
                self._kept_alive.append(value)
        elif isinstance(value, (list, tuple)) and isinstance(carriers, (list, tuple)):
            for part, carrier in zip(value, carriers, strict=True):
                self.bind(part, carrier)

    def node_of(self, tensor: Tensor) -> Node:
        """The new node that stands for a tensor of the replay."""
        tensor = whole_tensor(tensor)
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

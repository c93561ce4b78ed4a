"""One graph while its fp8 values are being replaced: which new nodes stand for which old ones."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule, Node

from deepinfer_prep.runtime.backend.node_values import WRITTEN_AS, logical_value, map_tensors, operation_name
from deepinfer_prep.runtime.backend.storage.layout import as_bytes

_VALUE_KEYS = frozenset({"example_value", "val", "tensor_meta"})


class Scope:
    """Rewrites one GraphModule in place.

    Old nodes keep their places, arguments and metadata until `finish`, so that the value of every old node
    can be looked up; new nodes are inserted before the old node that they replace.
    """

    def __init__(
        self, module: GraphModule, fake_mode: FakeTensorMode, moved_storages: frozenset[int] = frozenset()
    ) -> None:
        self.module = module
        self.graph = module.graph
        self.fake_mode = fake_mode
        self.old_nodes = list(module.graph.nodes)
        """The nodes as Dynamo made them, in order."""
        self.cuts_gradient = False
        """Whether a replaced operation would have passed a gradient on."""
        self._moved_storages = moved_storages
        self._carriers: dict[Node, Any] = {}
        self._replaced: list[Node] = []

    def is_moved(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the storage of an input that the compiled graph sees at another offset."""
        return tensor.untyped_storage()._cdata in self._moved_storages

    def carriers(self, node: Node) -> Any:
        """The nodes that stand for an old node's value, nested as the value is."""
        if node in self._carriers:
            return self._carriers[node]
        value = logical_value(node)
        if not isinstance(value, (list, tuple)) or not value:
            return node
        with self.graph.inserting_after(node):
            items = [self.graph.call_function(operator.getitem, (node, i)) for i in range(len(value))]
        for item, part in zip(items, value, strict=True):
            item.meta["example_value"] = map_tensors(as_bytes, part)
        self._carriers[node] = items
        return items

    def replace(self, node: Node, carriers: Any) -> None:
        """Let `carriers` stand for an old node, which is erased in the end."""
        self._carriers[node] = carriers
        self._replaced.append(node)
        if _requires_grad(logical_value(node)):
            self.cuts_gradient = True

    def is_nested(self, node: object) -> bool:
        """Whether an old node's value is a list or tuple that several new nodes stand for."""
        return isinstance(node, Node) and isinstance(self._carriers.get(node), (list, tuple))

    def item(self, node: Any, index: Any) -> Any:
        """What stands for one item of a nested value."""
        return self._carriers[node][index]

    def adopt(self, node: Node) -> None:
        """Keep an old node and point its arguments at the nodes that stand for them."""
        node.args = torch.fx.node.map_arg(node.args, self._replacement)
        node.kwargs = torch.fx.node.map_arg(node.kwargs, self._replacement)

    def describe(self, new: Node, old: Node, value: object) -> Node:
        """Give a new node the origin of the old one and its own value."""
        new.meta.update({key: item for key, item in old.meta.items() if key not in _VALUE_KEYS})
        new.meta[WRITTEN_AS] = operation_name(old)
        new.meta["example_value"] = map_tensors(as_bytes, value)
        return new

    def add_constant(self, tensor: Tensor, old: Node) -> Node:
        """A node that makes a real tensor of an operation's own, fp8 as uint8."""
        with unset_fake_temporarily():
            held = as_bytes(tensor)
            data = held.tolist()
        node = self.graph.call_function(torch.tensor, (data,), {"dtype": held.dtype, "device": held.device})
        return self.describe(node, old, self.fake_mode.from_tensor(held))

    def finish(self) -> None:
        """Erase what was replaced, give the nodes that stay the types of their bytes, regenerate code.

        To be called when every graph has been rewritten: the placeholders of a sub-graph may share their
        metadata with nodes of the graph around it.
        """
        for node in reversed(self._replaced):
            self.graph.erase_node(node)
        for node in self.graph.nodes:
            value = logical_value(node)
            if value is not None:
                node.meta = {**node.meta, "example_value": map_tensors(as_bytes, value)}
        self.graph.lint()
        self.module.recompile()

    def _replacement(self, node: Node) -> Any:
        return self._carriers.get(node, node)


def _requires_grad(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(_requires_grad(item) for item in value)

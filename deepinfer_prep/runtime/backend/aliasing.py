"""Which inputs a graph writes to."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from deepinfer_prep.runtime.backend.values import leaves, logical_value


def written_inputs(module: GraphModule) -> list[int]:
    """Indices of the placeholders whose storage the graph may write to."""
    storages = {
        _storage(leaf)
        for node in module.graph.nodes
        for written in _written_nodes(node)
        for leaf in leaves(logical_value(written))
        if isinstance(leaf, Tensor)
    }
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [index for index, node in enumerate(inputs) if _storage(logical_value(node)) in storages]


def _storage(value: object) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, FakeTensor) else None


def _written_nodes(node: Node) -> Iterator[Node]:
    """The arguments that a node may write to; all of them where that is not known exactly."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return
    if isinstance(node.target, OpOverload):
        names = [argument.name for argument in node.target._schema.arguments if _is_written(argument)]
        values = [value for name, value in _by_name(node, node.target) if name in names]
        yield from (leaf for leaf in leaves(values) if isinstance(leaf, Node))
    elif _may_write(node):
        yield from node.all_input_nodes


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _by_name(node: Node, target: OpOverload) -> Iterator[tuple[str, Any]]:
    names = [argument.name for argument in target._schema.arguments]
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def _may_write(node: Node) -> bool:
    if isinstance(node.target, HigherOrderOperator) or node.op == "call_module" or node.target is operator.setitem:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = getattr(node.target, "__module__", "") == "_operator" and name.startswith("i") and name != "is_"
    return in_place or augmented or bool(node.kwargs.get("out") or node.kwargs.get("inplace"))

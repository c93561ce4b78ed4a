"""What a graph writes to."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from deepinfer_prep.runtime.backend.codec_operations import CodecOperation
from deepinfer_prep.runtime.backend.node_values import leaves, logical_value, refuse


def written_inputs(module: GraphModule) -> list[int]:
    """Indices of the placeholders whose storage the graph may write to."""
    storages = {
        _storage(leaf)
        for node in module.graph.nodes
        for written in _written_nodes(node)
        for leaf in leaves(logical_value(written))
        if isinstance(leaf, FakeTensor)
    }
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [index for index, node in enumerate(inputs) if _storage(logical_value(node)) in storages]


def refuse_overlapping_writes(module: GraphModule) -> None:
    """Refuse writes into tensors of which several elements are one place in memory, such as expanded ones.

    Views of such tensors count too. Eager writes the place; AOT adds up what all its elements would hold.
    """
    for node in module.graph.nodes:
        exact = isinstance(node.target, OpOverload)
        if exact or node.op == "call_method" or node.target is operator.setitem:
            written = list(_written_nodes(node))
            if any(_overlaps(value) for first in written[: None if exact else 1] for value in _views(first)):
                raise refuse(node, "it writes into a tensor whose elements overlap in memory; use .clone() first")


def _views(node: Node) -> Iterator[FakeTensor]:
    """A node's value and those that it is a view of."""
    value = logical_value(node)
    while isinstance(value, FakeTensor):
        yield value
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or _storage(logical_value(source)) != _storage(value):
            return
        node, value = source, logical_value(source)


def _overlaps(tensor: FakeTensor) -> bool:
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


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
    if isinstance(node.target, CodecOperation):
        return False
    if isinstance(node.target, HigherOrderOperator) or node.op == "call_module" or node.target is operator.setitem:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = getattr(node.target, "__module__", "") == "_operator" and name.startswith("i") and name != "is_"
    return in_place or augmented or bool(node.kwargs.get("out") or node.kwargs.get("inplace"))

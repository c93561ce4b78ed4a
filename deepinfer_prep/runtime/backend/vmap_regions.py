"""torch.vmap over fp8 values: what is inside is rewritten as the operations on whole tensors that vmap makes of it.

Dynamo's graph holds the start and the end of a vmap as nodes, and between them operations on batched tensors. Run
within a vmap of the same size, each of them dispatches to operations on the tensors that the batched ones wrap, which
are rewritten as all others are; start, end and wrapping leave nothing behind. Eager runs the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Node

from deepinfer_prep.runtime.backend.emitter import Emitter
from deepinfer_prep.runtime.backend.node_values import refuse
from deepinfer_prep.runtime.backend.rewriter import Rewriter
from deepinfer_prep.runtime.backend.scope import Scope

_START, _END = "_vmap_increment_nesting", "_vmap_decrement_nesting"


def regions(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """The nodes of a graph in order: those of each outermost vmap together, every other one by itself."""
    region: list[Node] = []
    depth = 0
    for node in nodes:
        region.append(node)
        depth += (_name(node) == _START) - (_name(node) == _END)
        if depth == 0:
            yield region
            region = []
    if region:
        yield region


def rewrite_region(scope: Scope, region: Sequence[Node], visit_attribute: Callable[[Node], None]) -> None:
    """Replace the nodes of a vmap by operations on whole tensors.

    Args:
        visit_attribute: what becomes of a tensor that the graph holds.

    Raises:
        LegalizationError: an operation has no exact form on bytes, or is a higher-order one.
    """
    traced = {node: node.meta.get("example_value") for node in region}
    depth = 0
    try:
        for node in region:
            with scope.graph.inserting_before(node):
                depth += _rewrite(scope, node, visit_attribute)
    finally:
        for _ in range(depth):
            torch._C._functorch._vmap_decrement_nesting()
        for node, value in traced.items():
            node.meta["example_value"] = value


def _rewrite(scope: Scope, node: Node, visit_attribute: Callable[[Node], None]) -> int:
    """Rewrite one node. Returns by how much it changes how many vmaps are open."""
    if node.op == "get_attr":
        visit_attribute(node)
    elif isinstance(node.target, HigherOrderOperator):
        raise refuse(node, "it meets fp8 values inside torch.vmap; take it out of the vmap")
    elif _name(node) == _START:
        scope.replace(node, None)
        torch._C._functorch._vmap_increment_nesting(*node.args)  # type: ignore[arg-type]
        return 1
    elif _name(node) == _END:
        scope.replace(node, None)
        torch._C._functorch._vmap_decrement_nesting()
        return -1
    else:
        emitter = Emitter(scope, node)
        value: Any = Rewriter(emitter).replay()
        scope.replace(node, emitter.tree_of(value))
        node.meta["example_value"] = value
    return 0


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", ""))

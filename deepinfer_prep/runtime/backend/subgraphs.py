"""Walking a graph module and the sub-graphs of its higher-order operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree


def graph_modules(module: GraphModule) -> Iterator[GraphModule]:
    """A graph module and every graph module that its graph refers to, each once."""
    seen: set[int] = set()
    pending = [module]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending.extend(reversed(list(_direct_subgraphs(current))))


def _direct_subgraphs(module: GraphModule) -> Iterator[GraphModule]:
    for node in module.graph.nodes:
        if node.op == "get_attr":
            held = attribute(module, str(node.target))
            if isinstance(held, GraphModule):
                yield held
        elif node.op == "call_module":
            called = module.get_submodule(str(node.target))
            if isinstance(called, GraphModule):
                yield called


def operand_subgraphs(module: GraphModule, node: Node) -> list[GraphModule]:
    """The sub-graphs that a higher-order operation's node is given."""
    sources = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    held = [attribute(module, str(source.target)) for source in sources if source.op == "get_attr"]
    return [item for item in held if isinstance(item, GraphModule)]


def attribute(module: Any, path: str) -> Any:
    """What a get_attr node of a module's graph refers to; None if there is nothing."""
    for part in path.split("."):
        module = getattr(module, part, None)
    return module

"""A graph over the tensors of its layout, instead of over the program's arguments.

Within torch.compile the graph modules made here write their Python code only when it is asked for, as Dynamo's do;
compilers go by the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module

from deepinfer_prep.runtime.backend.byte_formats import CARRIER
from deepinfer_prep.runtime.backend.storage.layout import ByteRange, Layout, Nest, Part, Whole

aten = torch.ops.aten


def copy_graph(module: GraphModule) -> GraphModule:
    """The same graph over the same attributes; compilers may change the graph that they are given."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return _make_graph_module(module, graph)


def with_layout(module: GraphModule, layout: Layout, examples: Sequence[Any]) -> GraphModule:
    """A copy of a graph that takes what `layout` hands over; `examples` are fake tensors for that."""
    graph = Graph()
    old = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = []
    for number, (source, example) in enumerate(zip(layout.sources, examples, strict=True)):
        whole = isinstance(source, Whole)
        node = graph.placeholder(str(old[source.index].target) if whole else f"byte_range_{number}")
        node.meta["example_value"] = example
        sources.append(node)
    copies: dict[Node, Node] = {}
    for source, node in zip(layout.sources, sources, strict=True):
        if isinstance(source, Whole):
            copies[old[source.index]] = _unpermuted(graph, node, source)
    for index, part in enumerate(layout.parts):
        if part is not None:
            source = layout.sources[part.source]
            assert isinstance(source, ByteRange), "only byte ranges have parts"
            copies[old[index]] = _taken(graph, sources[part.source], part, source.length)
    for placeholder, copy in copies.items():
        if copy.op != "placeholder":
            copy.meta.update(placeholder.meta)
    graph.output(graph.graph_copy(module.graph, copies))
    return _make_graph_module(module, graph)


def _unpermuted(graph: Graph, node: Node, source: Whole) -> Node:
    if source.permutation is None:
        return node
    inverse = sorted(range(len(source.permutation)), key=source.permutation.__getitem__)
    return graph.call_function(aten.permute.default, (node, inverse))


def _taken(graph: Graph, node: Node, part: Part, available: int) -> Node:
    """The argument that a part describes, out of a node of `available` bytes."""

    def call(target: OpOverload, *args: Any) -> None:
        nonlocal node
        node = graph.call_function(target, (node, *args))

    if (part.begin, part.length) != (0, available):
        call(aten.slice.Tensor, 0, part.begin, part.begin + part.length)
    if part.dtype is not CARRIER:
        call(aten.view.dtype, part.dtype)
    nest = part.nest
    call(aten.view.default, list(nest.shape) if nest.shape[-1] > 1 else list(nest.shape[:-1]))
    for dim, (start, size) in enumerate(zip(nest.starts, nest.sizes, strict=True)):
        if size < nest.shape[dim]:
            call(aten.slice.Tensor, dim, start, start + size)
    if nest.shape[-1] > 1:
        call(aten.select.int, len(nest.sizes), nest.last)
    for target, *args in _arranged(nest, part.shape):
        call(target, *args)
    return node


def _arranged(nest: Nest, shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """The calls that bring the dimensions of a nest into the tensor's own order and number."""
    calls: list[tuple[Any, ...]] = []
    order = [place for place in nest.order if place >= 0]
    if order != sorted(order):
        calls.append((aten.permute.default, order))
    calls += [(aten.unsqueeze.default, dim) for dim, place in enumerate(nest.order) if place < 0]
    if any(place < 0 and size > 1 for place, size in zip(nest.order, shape, strict=True)):
        calls.append((aten.expand.default, list(shape)))
    return calls

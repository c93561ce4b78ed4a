"""Gives every size of a graph the value that it has in this call.

torch.compile's default makes a size symbolic when it changes from one call to the next, but a Trainium graph has
static shapes. A graph whose sizes are symbolic is therefore traced once more with the sizes of the call at hand;
torch guards them, and compiles again for the next ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

from deepinfer_prep.runtime.backend.node_values import logical_value, refuse
from deepinfer_prep.runtime.backend.subgraphs import attribute

_log = logging.getLogger(__name__)


def has_symbolic_sizes(module: GraphModule) -> bool:
    """Whether an input of a graph has a size, or is a number, that torch.compile took for dynamic."""
    return any(_is_symbolic(logical_value(node)) for node in _inputs(module))


def make_static(module: GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """Trace a Dynamo graph again, in place, with the sizes of `example_inputs`; its inputs are tensors afterwards.

    The compiled graph serves calls with these sizes only: each is guarded. torch compiles as many as
    `torch._dynamo.config.recompile_limit` allows and then runs the function eagerly, or raises with fullgraph=True.

    Returns:
        The positions of the inputs that the graph still has: sizes that were inputs are not.

    Raises:
        LegalizationError: an input is a number that changes and not a size, or the graph has sub-graphs.
    """
    inputs = list(_inputs(module))
    _refuse_what_stays_dynamic(module, inputs)
    mode = FakeTensorMode()
    for node, example in zip(inputs, example_inputs, strict=True):
        _guard(logical_value(node))
        node.meta["example_value"] = _static(mode, example)
    _trace_again(module, mode)
    _log.warning(
        "torch.compile saw sizes change and made them dynamic; deepinfer_neuron compiles each shape on its own, at "
        "most %d of one function (torch._dynamo.config.recompile_limit). Beyond that torch runs it eagerly. Pad to a "
        "few shapes, or raise the limit; dynamic=False says the same without this message.",
        torch._dynamo.config.recompile_limit,
    )
    kept = [position for position, node in enumerate(inputs) if isinstance(logical_value(node), Tensor)]
    for position in sorted(set(range(len(inputs))) - set(kept), reverse=True):
        module.graph.erase_node(inputs[position])
    module.recompile()
    return kept


def _inputs(module: GraphModule) -> Iterator[Node]:
    return (node for node in module.graph.nodes if node.op == "placeholder")


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, FakeTensor):
        return bool(value._has_symbolic_sizes_strides)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _refuse_what_stays_dynamic(module: GraphModule, inputs: Sequence[Node]) -> None:
    sizes = {symbol for node in inputs for symbol in _symbols(logical_value(node))}
    for node in inputs:
        value = logical_value(node)
        number = _is_symbolic(value) and not isinstance(value, Tensor)
        if number and not (isinstance(value, torch.SymInt) and str(value) in sizes):
            raise refuse(
                node,
                "it is a number that changes from call to call, and Trainium graphs have static shapes and numbers; "
                "pass numbers that change, such as positions, as tensors",
            )
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise refuse(
                node,
                "its graph has sizes that torch.compile made dynamic, and sub-graphs. Pass dynamic=False to "
                "torch.compile (every shape gets a graph of its own), or mark the dimension with "
                "torch._dynamo.mark_static",
            )


def _symbols(value: Any) -> Iterator[str]:
    """The symbols that sizes and strides of a tensor are made of."""
    if isinstance(value, FakeTensor):
        for size in (*value.shape, *value.stride(), value.storage_offset()):
            if isinstance(size, torch.SymInt):
                yield from (str(symbol) for symbol in size.node.expr.free_symbols)


def _guard(value: Any) -> None:
    """Let torch guard that every size is what it is now: asking a symbol for its number does."""
    if isinstance(value, torch.SymInt):
        int(value)
    elif isinstance(value, FakeTensor):
        for size in (*value.shape, *value.stride(), value.storage_offset()):
            int(size)


def _static(mode: FakeTensorMode, example: Any) -> Any:
    if isinstance(example, Tensor):
        return mode.from_tensor(example, static_shapes=True)
    return int(example) if isinstance(example, torch.SymInt) else example


def _trace_again(module: GraphModule, mode: FakeTensorMode) -> None:
    grad = torch.is_grad_enabled()
    try:
        for node in list(module.graph.nodes):
            if node.op == "get_attr":
                held = attribute(module, str(node.target))
                node.meta["example_value"] = _static(mode, held)
            elif node.op not in ("placeholder", "output"):
                node.meta["example_value"] = _run(module, mode, node)
            if isinstance(logical_value(node), (bool, int, float)):
                _inline(module, node)
    finally:
        torch.set_grad_enabled(grad)
    module.graph.lint()


def _run(module: GraphModule, mode: FakeTensorMode, node: Node) -> Any:
    args: tuple[Any, ...] = torch.fx.node.map_arg(node.args, logical_value)
    kwargs: Mapping[str, Any] = torch.fx.node.map_arg(dict(node.kwargs), logical_value)
    with mode:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return module.get_submodule(str(node.target))(*args, **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _inline(module: GraphModule, node: Node) -> None:
    """Put a number that is known now in the place of its node."""
    number = logical_value(node)
    for user in list(node.users):
        user.args = torch.fx.node.map_arg(user.args, lambda source: number if source is node else source)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda source: number if source is node else source)
    if node.op != "placeholder":
        module.graph.erase_node(node)

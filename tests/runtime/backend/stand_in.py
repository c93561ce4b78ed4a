"""A stand-in for torch_neuronx.neuron_dynamo_backend.backend, strict where the real one is.

The real `neuron_backend(gm, example_inputs, *, options=None, mode="default")` looks for mutated inputs on the
Dynamo graph, runs aot_autograd with kept input mutations and its own decompositions, imports the result into
MLIR, which knows no e4m3fn, no e8m0 and no dynamic shape, and runs it on contiguous tensors, into freshly
allocated contiguous outputs. Here the AOT graph itself runs, and everything else is checked.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten

UNKNOWN_TYPES = {
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float4_e2m1fn_x2,
}

DECOMPOSITIONS = get_decompositions(
    [
        aten.squeeze.dims,
        aten.nansum,
        aten._unsafe_index,
        aten._unsafe_index_put,
        aten.split,
        aten.split_with_sizes,
        aten.unbind,
        aten.embedding,
        aten.clamp_min,
        aten.clamp_max,
        aten.fill.Scalar,
        aten.fill.Tensor,
        aten.index_add,
        aten.lerp,
        aten.silu,
    ]
)
"""The data movement and elementwise part of what torch-neuronx decomposes."""

VIEWS = {
    *("t", "transpose", "view", "slice", "reshape", "permute", "expand", "expand_as", "squeeze", "unsqueeze"),
    *("as_strided", "chunk", "unfold", "narrow", "split", "unbind", "select", "unflatten", "flatten"),
}
"""What the real analysis knows as views, of methods and of aten operations."""


class UnsupportedError(RuntimeError):
    """What makes the real backend, its compiler or its runtime fail."""


@dataclass
class Compiled:
    """One graph that went through the stand-in."""

    options: dict[str, Any]
    mode: str
    mutated: list[int]
    """Inputs that the analysis of the Dynamo graph found to be written to."""
    aot_graphs: list[GraphModule] = field(default_factory=list)
    calls: int = 0


COMPILED: list[Compiled] = []


def neuron_backend(
    gm: GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None, mode: str = "default"
) -> Callable[..., Any]:
    options = {} if options is None else options
    options.setdefault("dynamic", False)
    for example in example_inputs:
        if not isinstance(example, Tensor):
            raise UnsupportedError(f"graph input {example!r} is not a tensor")
        _require_known(example, "graph input")
    record = Compiled(options, mode, find_mutated_inputs(gm))
    COMPILED.append(record)

    def compile_aot(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        record.aot_graphs.append(graph)
        return _compile(record, graph, examples)

    backend = aot_autograd(fw_compiler=compile_aot, keep_inference_input_mutations=True, decompositions=DECOMPOSITIONS)
    return backend(gm, example_inputs)


def _compile(record: Compiled, graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                _check_node(node)
    for example in examples:
        if isinstance(example, Tensor) and not example.is_contiguous():
            raise UnsupportedError(f"compiled graph takes strides {example.stride()} for shape {tuple(example.shape)}")
    _require_outputs(graph)
    shapes = [tuple(example.shape) if isinstance(example, Tensor) else None for example in examples]

    def execute(*args: Any) -> tuple[Any, ...]:
        record.calls += 1
        for arg, shape in zip(args, shapes, strict=True):
            _check_argument(arg, shape)
        storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        return tuple(_as_allocated(result, storages) for result in graph(*args))

    boxed: Callable[..., Any] = make_boxed_func(execute)
    return boxed


def _check_node(node: Node) -> None:
    for leaf in pytree.tree_leaves((node.meta.get("val"), node.args, node.kwargs)):
        if isinstance(leaf, torch.dtype) and leaf in UNKNOWN_TYPES:
            raise UnsupportedError(f"unknown element type {leaf} in {node.format_node()}")
        if isinstance(leaf, Tensor):
            _require_known(leaf, str(node.format_node()))
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UnsupportedError(f"dynamic value in {node.format_node()}")


def _require_known(tensor: Tensor, where: str) -> None:
    if tensor.dtype in UNKNOWN_TYPES:
        raise UnsupportedError(f"unknown element type {tensor.dtype} in {where}")
    if isinstance(tensor, FakeTensor) and tensor._has_symbolic_sizes_strides:
        raise UnsupportedError(f"dynamic shape {tensor.shape} in {where}")


def _require_outputs(graph: GraphModule) -> None:
    nodes = list(graph.graph.nodes)
    results = [leaf for leaf in pytree.tree_leaves(nodes[-1].args[0]) if leaf is not None]
    writes = [node for node in nodes if node.target is aten.copy_.default]
    if not results and not writes:
        raise UnsupportedError("no outputs found in the module, expected at least one output")


def _check_argument(arg: Any, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        return
    if arg.dtype in UNKNOWN_TYPES:
        raise UnsupportedError(f"unknown element type {arg.dtype} at run time")
    if not arg.is_contiguous():
        raise UnsupportedError("Cannot process non-contiguous tensors")
    if tuple(arg.shape) != shape:
        raise UnsupportedError(f"compiled for {shape}, called with {tuple(arg.shape)}")


def _as_allocated(result: Any, argument_storages: set[int]) -> Any:
    if not isinstance(result, Tensor):
        return result
    result = result.contiguous()
    return result.clone() if result.untyped_storage().data_ptr() in argument_storages else result


# ---------------------------------------------------------------------------------------------------------
# The analysis that tells the compiler which inputs are written to


def find_mutated_inputs(gm: GraphModule) -> list[int]:
    """Indices of the placeholders that a Dynamo graph writes to, chased back by names as the real pass does."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    found = {_root(target) for node in gm.graph.nodes for target in _written(node)}
    return [index for index, node in enumerate(inputs) if node in found]


def _written(node: Node) -> Iterator[Node]:
    in_place = node.op == "call_method" and str(node.target).endswith("_")
    if (in_place or node.target is operator.setitem) and isinstance(node.args[0], Node):
        yield node.args[0]
    schema = getattr(node.target, "_schema", None)
    for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
        if argument.alias_info and argument.alias_info.is_write and isinstance(value, Node):
            yield value


def _root(node: Node) -> Node | None:
    while node.op != "placeholder":
        if not _is_view(node) or not isinstance(node.args[0], Node):
            return None
        node = node.args[0]
    return node


def _is_view(node: Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in VIEWS
    if node.target is operator.getitem:
        return any(isinstance(leaf, slice) for leaf in pytree.tree_leaves(list(node.args[1:])))
    return str(getattr(node.target, "__name__", "")).partition(".")[0] in VIEWS


@contextmanager
def installed() -> Iterator[list[Compiled]]:
    """Make `torch_neuronx.neuron_dynamo_backend.backend` importable; yields what gets compiled."""
    names = ("torch_neuronx", "torch_neuronx.neuron_dynamo_backend", "torch_neuronx.neuron_dynamo_backend.backend")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].neuron_backend = neuron_backend  # type: ignore[attr-defined]
    COMPILED.clear()
    try:
        yield COMPILED
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module

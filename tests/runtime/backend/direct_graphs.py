"""Graphs such as Dynamo hands to a backend, made by running a program on tensors that record: in a tenth of the time.

Each operation becomes a node that is called as Dynamo would write it (methods as methods, operators as operators).
It is run for the node's `example_value`: on fake tensors, or within `plain_values` on small real ones, in a twentieth
of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import predispatch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils import _pytree as pytree

_QUESTIONS = ("dim", "size", "numel", "stride")
_CREATORS = ("full", "tensor", "zeros", "ones", "empty", "scalar_tensor")
_OPERATORS = ("add", "sub", "mul", "mod", "matmul", "eq", "ne", "gt", "lt")


class Traced:
    """A tensor, or a tuple of tensors, of a graph that is being made."""

    def __init__(self, tracer: Tracer, node: Node, value: Any) -> None:
        self._tracer, self._node, self._value = tracer, node, value

    def __getattr__(self, name: str) -> Any:
        held = getattr(self._value, name)
        if not callable(held) or name in _QUESTIONS:
            return held
        return lambda *args, **kwargs: self._tracer.call("call_method", name, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(self._value, tuple):
            index = range(len(self._value))[index]
        return self._tracer.call("call_function", operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self._tracer.call("call_function", operator.setitem, (self, index, value), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = next(leaf._tracer for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Traced))
        return tracer.call("call_function", func, args, kwargs or {})


def _operator(name: str) -> Callable[[Traced, Any], Any]:
    target = getattr(operator, name)
    return lambda self, other: self._tracer.call("call_function", target, (self, other), {})


for _name in _OPERATORS:
    setattr(Traced, f"__{_name}__", _operator(_name))


class TracedTorch:
    """`torch` with functions that make tensors of nothing recorded too; what takes a tensor is seen anyway."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def vmap(self, function: Callable[..., Traced]) -> Callable[..., Traced]:
        """torch.vmap over the first dimension, with the nodes that Dynamo makes of it."""

        def run(*batches: Traced) -> Traced:
            size = batches[0].shape[0]
            level = self._tracer.call("call_function", predispatch._vmap_increment_nesting, (size, "error"), {})._value
            elements = [
                self._tracer.call("call_function", predispatch._add_batch_dim, (x, 0, level), {}) for x in batches
            ]
            ends = (function(*elements), level, size, 0)
            result: Traced = self._tracer.call("call_function", predispatch._remove_batch_dim, ends, {})
            self._tracer.call("call_function", predispatch._vmap_decrement_nesting, (), {})
            return result

        return run

    def __getattr__(self, name: str) -> Any:
        held = getattr(torch, name)
        if name not in _CREATORS:
            return held
        return lambda *args, **kwargs: self._tracer.call("call_function", held, args, kwargs)


class Tracer:
    """One graph while it is made."""

    def __init__(self, fake_mode: Any) -> None:
        self.graph = Graph()
        self._fake_mode = fake_mode

    def placeholder(self, name: str, fake: Tensor) -> Traced:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = fake
        return Traced(self, node, fake)

    def call(self, op: str, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record a call and run it on fake tensors."""
        fake_args, fake_kwargs = _map((args, dict(kwargs)), lambda traced: traced._value)
        with self._fake_mode:
            if op == "call_method":
                value = getattr(fake_args[0], target)(*fake_args[1:], **fake_kwargs)
            else:
                value = target(*fake_args, **fake_kwargs)
        node_args, node_kwargs = _map((args, dict(kwargs)), lambda traced: traced._node)
        node = self.graph.create_node(op, target, node_args, node_kwargs)
        value = tuple(value) if isinstance(value, list) else value
        node.meta["example_value"] = value
        return Traced(self, node, value)


def _map(tree: Any, function: Callable[[Traced], Any]) -> Any:
    if isinstance(tree, Traced):
        return function(tree)
    if isinstance(tree, slice):
        return slice(*(_map(part, function) for part in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(part, function) for part in tree)
    if isinstance(tree, dict):
        return {key: _map(part, function) for key, part in tree.items()}
    return tree


def trace(function_in: Callable[[Any], Callable[..., Any]], fakes: Mapping[str, Tensor], fake_mode: Any) -> GraphModule:
    """The graph of a program that takes tensors by name and returns a list of tensors.

    Args:
        function_in: gives the program, for what stands for `torch` in it.
        fakes: the inputs, as fake tensors of `fake_mode` that share storage where the real ones do; within
            `plain_values` copies of the inputs.
    """
    tracer = Tracer(fake_mode)
    inputs = {name: tracer.placeholder(name, fake) for name, fake in fakes.items()}
    results = function_in(TracedTorch(tracer))(**inputs)
    tracer.graph.output(tuple(result._node for result in results))
    with _use_lazy_graph_module(True):
        return _make_graph_module(torch.nn.Module(), tracer.graph)


class PlainMode:
    """Takes the place of a fake tensor mode where values are real tensors."""

    def __enter__(self) -> PlainMode:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def from_tensor(self, tensor: Tensor, static_shapes: bool = True) -> Tensor:
        """The tensor itself."""
        return tensor


_ASKS_FOR_FAKE = ("rewriter", "legalize", "storage.aliasing", "storage.outputs", "input_checks", "compile")
"""Modules of the backend that tell fake tensors from others."""


@contextmanager
def plain_values() -> Iterator[PlainMode]:
    """Let the backend take real tensors for fake ones: what it does with a graph is the same, and much faster."""
    package = "deepinfer_prep.runtime.backend"
    mode = PlainMode()
    with ExitStack() as patches:
        for module in _ASKS_FOR_FAKE:
            patches.enter_context(patch(f"{package}.{module}.FakeTensor", Tensor))
        patches.enter_context(patch(f"{package}.compile._tracing_mode", lambda module: mode))
        patches.enter_context(patch(f"{package}.compile._aot_mode", lambda: mode))
        patches.enter_context(patch(f"{package}.storage.variants.FakeTensorMode", PlainMode))
        yield mode

"""What crosses the border of a compiled graph: contiguous uint8 tensors in, fp8 views out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepinfer_prep.runtime.backend.formats import CARRIER, carried
from deepinfer_prep.runtime.backend.scope import Scope, as_bytes
from deepinfer_prep.runtime.backend.values import logical_value, refuse


@dataclass(frozen=True)
class InputView:
    """A contiguous tensor on the storage of one graph input, and how the graph gets the input back.

    The device takes contiguous tensors only. An input whose elements fill their storage range in another
    order is permuted; any other is handed over as the one-dimensional range of storage that it spans.
    """

    permutation: tuple[int, ...] | None = None
    span: int | None = None

    def lower(self, tensor: Tensor) -> Tensor:
        """The contiguous tensor that is handed over: bytes for fp8, always on the same storage."""
        tensor = as_bytes(tensor)
        if self.permutation is not None:
            tensor = tensor.permute(self.permutation)
        elif self.span is not None:
            tensor = tensor.as_strided((self.span,), (1,))
        return tensor.detach() if tensor.dtype is CARRIER else tensor

    def restore(self, scope: Scope, node: Node) -> Node:
        """The node that has the input's own shape and strides again."""
        value = as_bytes(logical_value(node))
        if self.permutation is not None:
            inverse = sorted(range(value.dim()), key=self.permutation.__getitem__)
            return scope.graph.call_function(torch.ops.aten.permute.default, (node, inverse))
        if self.span is not None:
            args: tuple[Any, ...] = (node, list(value.shape), list(value.stride()), 0)
            return scope.graph.call_function(torch.ops.aten.as_strided.default, args)
        return node


def plan_input(tensor: Tensor) -> InputView:
    """How to hand over a graph input, from the shape and strides that the graph was traced with."""
    if tensor.is_contiguous():
        return InputView()
    strides, shape = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (strides[dim], shape[dim]), reverse=True))
    if tensor.permute(order).is_contiguous():
        return InputView(permutation=order)
    return InputView(span=1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))


def plan_inputs(scope: Scope) -> list[InputView | None]:
    """One view for each placeholder, None where it is no plain tensor; puts the inverse into the graph."""
    placeholders = [node for node in scope.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        _require_static_plain(node)
    body = next(node for node in scope.graph.nodes if node.op != "placeholder")
    views: list[InputView | None] = []
    for node in placeholders:
        value = logical_value(node)
        view = plan_input(value) if isinstance(value, FakeTensor) else None
        views.append(view)
        if view is None or view == InputView():
            continue
        with scope.graph.inserting_before(body):
            scope.stand_in(node, scope.describe(view.restore(scope, node), node, value), view.lower(value))
    return views


def _require_static_plain(node: Node) -> None:
    value = logical_value(node)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
        isinstance(value, FakeTensor) and value._has_symbolic_sizes_strides
    ):
        raise refuse(
            node,
            "its size or value is dynamic, and Trainium graphs have static shapes. Pass dynamic=False to "
            "torch.compile (every shape gets a graph of its own), or mark the dimension with "
            "torch._dynamo.mark_static; pass numbers that change, such as positions, as tensors",
        )
    if isinstance(value, Tensor) and _hides_fp8(value):
        raise refuse(
            node,
            f"fp8 values inside a {type(value).__name__} are not supported; pass its plain tensor instead",
        )


def _hides_fp8(value: Tensor) -> bool:
    """Whether a tensor subclass, or a tensor that is not strided, holds fp8 values."""
    if isinstance(value, FakeTensor) or not is_traceable_wrapper_subclass(value):
        return carried(value) is not None and value.layout is not torch.strided
    names, _ = value.__tensor_flatten__()
    parts = [getattr(value, name) for name in names]
    return carried(value) is not None or any(carried(part) is not None or _hides_fp8(part) for part in parts)


def lower_all(views: Sequence[InputView | None], args: Sequence[Any]) -> list[Any]:
    """What is handed over for the arguments of a call."""
    return [arg if view is None else view.lower(arg) for arg, view in zip(args, views, strict=True)]


@dataclass(frozen=True)
class OutputView:
    """What one output of the compiled graph is in the program.

    dtype: the fp8 type to view it as. argument: the argument that it is. with_gradient: whether eager
    would give it a gradient.
    """

    dtype: torch.dtype | None
    argument: int | None
    with_gradient: bool


def plan_outputs(module: GraphModule) -> list[OutputView]:
    """One view for each output, in order; to be called before the graph is rewritten."""
    nodes = list(module.graph.nodes)
    arguments = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
    views = []
    for leaf in nodes[-1].args[0]:
        value = logical_value(leaf) if isinstance(leaf, Node) else None
        fmt = carried(value)
        views.append(
            OutputView(
                dtype=None if fmt is None else fmt.dtype,
                argument=arguments.get(leaf) if isinstance(leaf, Node) else None,
                with_gradient=isinstance(value, Tensor) and value.requires_grad,
            )
        )
    return views


def wrap(
    compiled: Callable[..., Sequence[Any]],
    inputs: Sequence[InputView | None],
    outputs: Sequence[OutputView],
) -> Callable[..., tuple[Any, ...]]:
    """A callable that takes and returns what the program does, around one that takes and returns bytes."""

    def run(*args: Any) -> tuple[Any, ...]:
        results = compiled(*lower_all(inputs, args))
        return tuple(_restore(result, view, args) for result, view in zip(results, outputs, strict=True))

    return run


def _restore(result: Any, view: OutputView, args: Sequence[Any]) -> Any:
    if view.argument is not None:
        return args[view.argument]
    return result if view.dtype is None else result.view(view.dtype)

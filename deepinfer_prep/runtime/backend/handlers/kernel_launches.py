"""Device kernels in a graph: torch_neuronx represents a launch as one higher-order operation."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import Node

from deepinfer_prep.errors import LegalizationError
from deepinfer_prep.runtime.backend.declarations import Declaration, declaration_of
from deepinfer_prep.runtime.backend.handlers.custom_operations import check_declared_arguments, check_declared_results
from deepinfer_prep.runtime.backend.node_values import holds_carried, logical_value, map_tensors, refuse
from deepinfer_prep.runtime.backend.scope import Scope
from deepinfer_prep.runtime.backend.storage.layout import as_bytes


def adopt_kernel(scope: Scope, node: Node) -> None:
    """Keep a kernel launch; its fp8 operands and results must be declared.

    The launch has the keyword arguments `kernel_idx`, `args` (the operands) and `arg_names`.
    """
    launch: dict[str, Any] = torch.fx.node.map_arg(dict(node.kwargs), logical_value)
    operands = launch.get("args", ())
    value = logical_value(node)
    if holds_carried(operands) or holds_carried(value):

        def refusal(reason: str) -> LegalizationError:
            return refuse(node, reason)

        declaration = _declaration(node)
        named = dict(zip(launch.get("arg_names", ()), operands, strict=True))
        check_declared_arguments(refusal, declaration, named)
        if holds_carried(value):
            check_declared_results(refusal, declaration, value, _launch_on_bytes(scope, node))
    scope.adopt(node)


def _declaration(node: Node) -> Declaration:
    kernel = _kernel(node)
    declaration = None if kernel is None else declaration_of(kernel)
    if declaration is None:
        name = getattr(kernel, "__qualname__", f"number {node.kwargs.get('kernel_idx')}")
        raise refuse(
            node,
            f"kernel {name} takes or returns fp8 tensors and has not declared how; launch it on "
            "x.view(torch.uint8), or call declare_fp8(kernel, args=..., results=...)",
        )
    return declaration


def _kernel(node: Node) -> Any:
    """The Python function behind a launch, from the registry beside the higher-order operation."""
    module = sys.modules.get(type(node.target).__module__)
    registry = getattr(module, "kernel_registry", None)
    find = getattr(registry, "get_func", None) or getattr(registry, "get_kernel", None)
    kernel = find(node.kwargs["kernel_idx"]) if find is not None else None
    return getattr(kernel, "func", kernel)


def _launch_on_bytes(scope: Scope, node: Node) -> Any:
    """The results of the launch, as fake tensors, when its operands are bytes."""
    kwargs = torch.fx.node.map_arg(node.kwargs, logical_value)
    with scope.fake_mode, torch.no_grad():
        return node.target(**map_tensors(as_bytes, kwargs))  # type: ignore[operator]

"""From a Dynamo graph to a callable: legalize, check, hand on, restore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule

from deepinfer_prep.runtime.backend import boundary
from deepinfer_prep.runtime.backend.aliasing import (
    compile_for_each_sharing,
    fake_arguments,
    pristine_copy,
    written_inputs,
)
from deepinfer_prep.runtime.backend.checker import check
from deepinfer_prep.runtime.backend.debug import SKIP_CHECK, Report, switched_off
from deepinfer_prep.runtime.backend.downstream import Settings, compile_downstream, read_settings
from deepinfer_prep.runtime.backend.gradients import without_gradient
from deepinfer_prep.runtime.backend.legalize import legalize, modules_with_fp8
from deepinfer_prep.runtime.backend.scope import Scope
from deepinfer_prep.runtime.backend.subgraphs import graph_modules
from deepinfer_prep.runtime.backend.values import leaves, logical_value


def compile_graph(
    module: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    """What torch.compile calls with each graph; a graph without fp8 values is handed on untouched."""
    settings = read_settings(options, mode)
    with_fp8 = modules_with_fp8(module)
    if not with_fp8:
        return compile_downstream(settings, module, list(example_inputs))
    return _compile_bytes(settings, module, list(example_inputs), with_fp8)


def _compile_bytes(
    settings: Settings, module: GraphModule, example_inputs: list[Any], with_fp8: set[int]
) -> Callable[..., Any]:
    report = Report(settings.dump_dir)
    report.before(module)
    outputs = boundary.plan_outputs(module)
    parts = list(graph_modules(module))
    tracing_mode = _tracing_mode(module)
    scopes = [Scope(part, tracing_mode) for part in parts]
    inputs = boundary.plan_inputs(scopes[0])
    for scope in scopes:
        legalize(scope, with_fp8)
    for scope in scopes:
        scope.finish()
    report.after(module)
    if not switched_off(SKIP_CHECK):
        check(module)
    cuts_gradient = any(scope.cuts_gradient for scope in scopes)
    with torch.no_grad() if cuts_gradient else contextlib.nullcontext():
        compiled = _compile_lowered(settings, module, boundary.lower_all(inputs, example_inputs))
    run = boundary.wrap(compiled, inputs, outputs)
    return without_gradient(run, outputs) if cuts_gradient else run


def _compile_lowered(settings: Settings, module: GraphModule, arguments: list[Any]) -> Callable[..., Any]:
    """Compile the legalized graph; again at a later call if inputs come to share storage differently.

    arguments: what the graph is first called with.
    """
    written = written_inputs(module)
    pristine = pristine_copy(module) if written else None
    first = compile_downstream(settings, module, fake_arguments(arguments, _aot_mode()))
    if pristine is None:
        return first

    def compile_for(args: Sequence[Any]) -> Callable[..., Any]:
        return compile_downstream(settings, pristine_copy(pristine), fake_arguments(args, FakeTensorMode()))

    return compile_for_each_sharing(compile_for, first, arguments, written)


def _tracing_mode(module: GraphModule) -> FakeTensorMode:
    """The mode that Dynamo traced in: the one of the fake values in the graph's metadata."""
    for part in graph_modules(module):
        for node in part.graph.nodes:
            for leaf in leaves(logical_value(node)):
                if isinstance(leaf, FakeTensor):
                    return leaf.fake_mode
    return _aot_mode()


def _aot_mode() -> FakeTensorMode:
    """The mode that AOT will trace in. It is another one: Dynamo's tensors may have changed since."""
    context = TracingContext.try_get()
    return context.fake_mode if context is not None and context.fake_mode is not None else FakeTensorMode()

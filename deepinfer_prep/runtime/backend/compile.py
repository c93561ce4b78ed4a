"""From a Dynamo graph to a callable: legalize, check, hand on, restore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule

from deepinfer_prep.runtime.backend import input_checks
from deepinfer_prep.runtime.backend.debug import SKIP_CHECK, Report, switched_off
from deepinfer_prep.runtime.backend.downstream import Settings, compile_downstream, read_settings
from deepinfer_prep.runtime.backend.gradients import without_gradient
from deepinfer_prep.runtime.backend.leftover_check import check
from deepinfer_prep.runtime.backend.legalize import legalize, modules_with_fp8
from deepinfer_prep.runtime.backend.node_values import leaves, logical_value
from deepinfer_prep.runtime.backend.scope import Scope
from deepinfer_prep.runtime.backend.static_shapes import has_symbolic_sizes, make_static
from deepinfer_prep.runtime.backend.storage.aliasing import refuse_overlapping_writes
from deepinfer_prep.runtime.backend.storage.layout_graph import copy_graph
from deepinfer_prep.runtime.backend.storage.outputs import OutputView, plan_outputs, restore_outputs, separate_outputs
from deepinfer_prep.runtime.backend.storage.variants import Variants
from deepinfer_prep.runtime.backend.subgraphs import graph_modules


@dataclass(frozen=True, slots=True)
class Legalized:
    """What has to be done with the results of a graph that was rewritten."""

    outputs: Sequence[OutputView]
    cuts_gradient: bool


def compile_graph(
    module: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    """What torch.compile calls with each graph; a graph without fp8 values is handed on untouched."""
    settings = read_settings(options, mode)
    input_checks.require_supported_inputs(module)
    with_fp8 = modules_with_fp8(module)
    if not with_fp8:
        return compile_downstream(settings, module, list(example_inputs))
    if not has_symbolic_sizes(module):
        return _compile_bytes(settings, module, list(example_inputs), with_fp8)
    static = copy_graph(module)  # torch reads the inputs of its own graph once more after this call
    kept = make_static(static, example_inputs)
    run = _compile_bytes(settings, static, [example_inputs[position] for position in kept], modules_with_fp8(static))
    return lambda *args: run(*(args[position] for position in kept))


def _compile_bytes(
    settings: Settings, module: GraphModule, example_inputs: list[Any], with_fp8: set[int]
) -> Callable[..., Any]:
    report = Report(settings.dump_dir)
    report.before(module)
    legalized = legalize_in_place(module, with_fp8)

    def compile_checked(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        report.after(graph)
        if not switched_off(SKIP_CHECK):
            check(graph)
        return compile_downstream(settings, graph, examples)

    with torch.no_grad() if legalized.cuts_gradient else contextlib.nullcontext():
        compiled = Variants(module, compile_checked).compile_first(example_inputs, _aot_mode())
    run = restore_outputs(compiled, legalized.outputs)
    return without_gradient(run, legalized.outputs) if legalized.cuts_gradient else run


def legalize_in_place(module: GraphModule, with_fp8: set[int]) -> Legalized:
    """Rewrite a Dynamo graph and all graphs nested in it so that every fp8 value is carried as uint8.

    Args:
        with_fp8: what `modules_with_fp8` found.

    Raises:
        LegalizationError: an input or an operation has no exact form on bytes.
    """
    input_checks.require_supported_inputs(module)
    outputs = plan_outputs(module)
    tracing_mode = _tracing_mode(module)
    moved = input_checks.moved_storages(module)
    scopes = [Scope(part, tracing_mode, moved) for part in graph_modules(module)]
    for scope in scopes:
        legalize(scope, with_fp8)
    separate_outputs(scopes[0], outputs)
    for scope in scopes:
        scope.finish()
        refuse_overlapping_writes(scope.module)
    return Legalized(outputs, any(scope.cuts_gradient for scope in scopes))


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

"""One compiled graph for each way in which the arguments of a call lie in memory.

torch guards sizes and strides of arguments, but neither where in a storage they start nor which of them share
one. Where that makes a difference it is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from deepinfer_prep.runtime.backend.aliasing import written_inputs
from deepinfer_prep.runtime.backend.inputs import copy_graph, with_layout
from deepinfer_prep.runtime.backend.layout import Layout, StridedWriteError, plan_layout
from deepinfer_prep.runtime.backend.values import refuse

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


class Variants:
    """A legalized graph with everything that has been compiled for it."""

    def __init__(self, module: GraphModule, compiler: Compiler) -> None:
        self._module = module
        self._compiler = compiler
        self._written = written_inputs(module)
        self._compiled: dict[Layout, Callable[..., Any]] = {}

    def compile_first(self, args: Sequence[Any], fake_mode: FakeTensorMode) -> Callable[..., Any]:
        """Compile for the arguments of the first call; returns what runs that call and all others."""
        layout = self._plan(args)
        plain = layout.is_trivial
        module, self._module = self._module, copy_graph(self._module) if self._written else self._module
        compiled = self._compile(module, layout, args, fake_mode)
        if plain and not self._written:
            return lambda *call: compiled(*layout.lower(call))
        self._compiled[layout] = compiled
        return self._run

    def _run(self, *args: Any) -> Any:
        layout = self._plan(args)
        compiled = self._compiled.get(layout)
        if compiled is None:
            compiled = self._compile(copy_graph(self._module), layout, args, FakeTensorMode())
            self._compiled[layout] = compiled
        return compiled(*layout.lower(args))

    def _plan(self, args: Sequence[Any]) -> Layout:
        try:
            return plan_layout(args, self._written)
        except StridedWriteError as error:
            node = [node for node in self._module.graph.nodes if node.op == "placeholder"][error.index]
            raise refuse(
                node,
                "it is written to, or shares storage with an input that is, and its elements do not lie in rows "
                "of a whole number of elements; pass the tensor that it is a view of and take the view inside",
            ) from error

    def _compile(
        self, module: GraphModule, layout: Layout, args: Sequence[Any], fake_mode: FakeTensorMode
    ) -> Callable[..., Any]:
        examples = [
            fake_mode.from_tensor(arg, static_shapes=True) if isinstance(arg, Tensor) else arg
            for arg in layout.lower(args)
        ]
        if not layout.is_trivial:
            module = with_layout(module, layout, examples)
        return self._compiler(module, examples)

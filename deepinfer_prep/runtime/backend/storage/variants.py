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

from deepinfer_prep.runtime.backend.node_values import refuse
from deepinfer_prep.runtime.backend.storage.aliasing import written_inputs
from deepinfer_prep.runtime.backend.storage.layout import Layout, StridedWriteError, plan_layout, storage_of
from deepinfer_prep.runtime.backend.storage.layout_graph import copy_graph, with_layout

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


class Variants:
    """A legalized graph with everything that has been compiled for it."""

    def __init__(self, module: GraphModule, compiler: Compiler) -> None:
        self._module = module
        self._compiler = compiler
        self._written = written_inputs(module)
        self._variants: dict[Layout, Callable[..., Any]] = {}
        self._plain: list[int] = []
        self._special: list[int] = []

    def compile_first(self, args: Sequence[Any], fake_mode: FakeTensorMode) -> Callable[..., Any]:
        """Compile for the arguments of the first call; returns what runs that call and all others."""
        layout = self._plan(args)
        module, self._module = self._module, copy_graph(self._module) if self._written else self._module
        run = self._compile(module, layout, args, fake_mode)
        if layout.is_trivial and not self._written:
            return run
        for index, arg in enumerate(args):
            plain = isinstance(arg, Tensor) and arg.is_contiguous() and index not in self._written
            (self._plain if plain else self._special).append(index)
        self._variants[self._key(args)] = run
        return self._run

    def _run(self, *args: Any) -> Any:
        key = self._key(args)
        run = self._variants.get(key)
        if run is None:
            run = self._compile(copy_graph(self._module), self._plan(args), args, FakeTensorMode())
            self._variants[key] = run
        return run(*args)

    def _key(self, args: Sequence[Any]) -> Layout:
        """The layout of those arguments that can make a difference: most can not, and are only looked at."""
        written = {storage_of(args[index]) for index in self._written}
        shared = [index for index in self._plain if storage_of(args[index]) in written]
        return self._plan(args, sorted(self._special + shared))

    def _plan(self, args: Sequence[Any], considered: list[int] | None = None) -> Layout:
        try:
            return plan_layout(args, self._written, considered)
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
        """Compile a graph for a layout; returns what takes the arguments of a call."""
        lower = layout.lowering(args)
        examples = [
            fake_mode.from_tensor(arg, static_shapes=True) if isinstance(arg, Tensor) else arg for arg in lower(args)
        ]
        if not layout.is_trivial:
            module = with_layout(module, layout, examples)
        compiled = self._compiler(module, examples)
        return lambda *call: compiled(*lower(call))

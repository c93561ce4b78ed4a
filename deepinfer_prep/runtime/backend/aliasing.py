"""Inputs that share storage with an input that the graph writes to.

AOT compiles the sharing that it sees at the first call into the graph, offsets included, and nothing checks
it afterwards. Here every call is checked, and each way of sharing gets a compiled graph of its own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from deepinfer_prep.runtime.backend.values import leaves, logical_value

Pattern = tuple[tuple[tuple[int, int], ...], ...]
"""Groups of inputs that share a storage, each input as (index, byte offset from the first of its group)."""


def written_inputs(module: GraphModule) -> list[int]:
    """Indices of the placeholders whose storage the graph may write to."""
    storages = {
        _storage(leaf)
        for node in module.graph.nodes
        for written in _written_nodes(node)
        for leaf in leaves(logical_value(written))
        if isinstance(leaf, Tensor)
    }
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [index for index, node in enumerate(inputs) if _storage(logical_value(node)) in storages]


def _storage(value: object) -> int | None:
    """What identifies a tensor's storage while it lives, real or fake."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _written_nodes(node: Node) -> Iterator[Node]:
    """The arguments that a node may write to; all of them where that is not known exactly."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return
    if isinstance(node.target, OpOverload):
        names = [argument.name for argument in node.target._schema.arguments if _is_written(argument)]
        values = [value for name, value in _by_name(node, node.target) if name in names]
        yield from (leaf for leaf in leaves(values) if isinstance(leaf, Node))
    elif _may_write(node):
        yield from node.all_input_nodes


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _by_name(node: Node, target: OpOverload) -> Iterator[tuple[str, Any]]:
    names = [argument.name for argument in target._schema.arguments]
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def _may_write(node: Node) -> bool:
    if isinstance(node.target, HigherOrderOperator) or node.op == "call_module" or node.target is operator.setitem:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = getattr(node.target, "__module__", "") == "_operator" and name.startswith("i") and name != "is_"
    return in_place or augmented or bool(node.kwargs.get("out") or node.kwargs.get("inplace"))


def sharing(tensors: Sequence[Any], written: Sequence[int]) -> Pattern:
    """How inputs share storage, as far as one that is written to is among them."""
    groups = _groups(tensors)
    shared = {_storage(tensors[index]) for index in written}
    return tuple(sorted(_offsets(tensors, groups[storage]) for storage in shared if len(groups[storage]) > 1))


def _groups(tensors: Sequence[Any]) -> dict[int | None, list[int]]:
    groups: dict[int | None, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor):
            groups[_storage(tensor)].append(index)
    return groups


def _offsets(tensors: Sequence[Any], members: list[int]) -> tuple[tuple[int, int], ...]:
    places = [tensors[index].storage_offset() * tensors[index].element_size() for index in members]
    return tuple((index, place - places[0]) for index, place in zip(members, places, strict=True))


def fake_arguments(args: Sequence[Any], fake_mode: FakeTensorMode) -> list[Any]:
    """Fake tensors with static shapes for the arguments of a call, sharing storage as they do.

    Those that share are made as views of a storage that has its real size: AOT derives the common base of
    written inputs from it, and `from_tensor` would give it the size of the first tensor that it sees.
    """
    fakes = [fake_mode.from_tensor(arg, static_shapes=True) if isinstance(arg, Tensor) else arg for arg in args]
    for members in _groups(args).values():
        if len(members) > 1 and not any(args[index].requires_grad for index in members):
            storage = args[members[0]].untyped_storage()
            with fake_mode:
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
                for index in members:
                    fakes[index] = _view_like(base, args[index])
    return fakes


def _view_like(base: Tensor, tensor: Tensor) -> Tensor:
    """A tensor on the storage of `base` in the place that `tensor` has in its own."""
    whole = base[: base.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()


def compile_for_each_sharing(
    compile_for: Callable[[Sequence[Any]], Callable[..., Any]],
    first: Callable[..., Any],
    examples: Sequence[Any],
    written: Sequence[int],
) -> Callable[..., Any]:
    """Run `first` on arguments that share storage as `examples` do; compile anew for any other way.

    compile_for: compiles for given arguments. written: indices of the arguments that are written to.
    """
    variants = {sharing(examples, written): first}

    def run(*args: Any) -> Any:
        pattern = sharing(args, written)
        compiled = variants.get(pattern)
        if compiled is None:
            compiled = variants[pattern] = compile_for(args)
        return compiled(*args)

    return run


def pristine_copy(module: GraphModule) -> GraphModule:
    """The same graph over the same attributes; compilers may change the graph that they are given."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return GraphModule(module, graph)

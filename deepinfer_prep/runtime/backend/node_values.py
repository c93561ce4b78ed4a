"""Reading what a node of a Dynamo graph stands for, and naming it to the user."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from deepinfer_prep.errors import LegalizationError
from deepinfer_prep.runtime.backend.byte_formats import CARRIED, REFUSED, carried

_TORCH_FOLDER = os.path.dirname(torch.__file__)


_LEAF_TYPES = (Tensor, Node, torch.dtype, int, float, str, type(None))
"""Nearly all leaves; asking pytree about each takes several times longer than the walk."""


def leaves(tree: object) -> list[Any]:
    """Every leaf of nested arguments, those inside slices too."""
    found: list[Any] = []
    _collect_leaves(tree, found)
    return found


def _collect_leaves(tree: object, found: list[Any]) -> None:
    if isinstance(tree, _LEAF_TYPES):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect_leaves(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect_leaves(item, found)
    elif isinstance(tree, slice):
        found += (tree.start, tree.stop, tree.step)
    else:
        inside = pytree.tree_leaves(tree)
        for leaf in inside:
            if leaf is tree:
                found.append(leaf)
            else:
                _collect_leaves(leaf, found)


def holds_carried(tree: object) -> bool:
    """Whether an fp8 tensor or dtype occurs in nested values."""
    return any(carried(leaf) is not None for leaf in leaves(tree))


def holds_8_bit_floats(tree: object) -> bool:
    """Whether a tensor or dtype that is carried as bytes, or refused, occurs in nested values."""
    for leaf in leaves(tree):
        dtype = leaf.dtype if isinstance(leaf, Tensor) else leaf
        if isinstance(dtype, torch.dtype) and (dtype in CARRIED or dtype in REFUSED):
            return True
    return False


def refused_reason(tree: object) -> str | None:
    """Why a type that occurs in nested values cannot be compiled, if one occurs."""
    for leaf in leaves(tree):
        dtype = leaf.dtype if isinstance(leaf, Tensor) else leaf
        if isinstance(dtype, torch.dtype) and dtype in REFUSED:
            return f"it involves {dtype}: {REFUSED[dtype]}"
    return None


def logical_value(node: Node) -> Any:
    """The fake value that Dynamo computed for a node, in the types of the user's program."""
    return node.meta.get("example_value")


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor that a tensor inside torch.vmap is an element of; any other tensor itself."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def target_name(target: object) -> str:
    """A target as the user would write it: `torch.cat`, `torch.ops.aten.cat.default`, `sum`."""
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target._name}"
    name = getattr(target, "__name__", None) or type(target).__name__
    module = getattr(target, "__module__", None) or ""
    return f"{module}.{name}" if module and module != "builtins" else name


WRITTEN_AS = "deepinfer_written_as"
"""Metadata of new nodes: the name of the operation that they stand for."""


def operation_name(node: Node) -> str:
    """What a node does, for a message: the method, function or operator as the user wrote it."""
    if WRITTEN_AS in node.meta:
        return str(node.meta[WRITTEN_AS])
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op == "placeholder":
        return f"the input {source_name(node)}"
    if node.op == "get_attr":
        return f"the constant {node.target}"
    return target_name(node.target)


def source_name(node: Node) -> str:
    """A graph input as the user would write it, for instance `L['cache']`."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    if callable(name):  # a method up to torch 2.9
        name = name()
    return str(name or node.target)


def user_line(node: Node) -> str:
    """The innermost line outside torch that a node was traced from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    starts = [index for index, line in enumerate(lines) if line.startswith('File "')]
    if not starts:
        return "an unknown line (the graph has no stack trace for this operation)"
    outside = [index for index in starts if not lines[index].startswith(f'File "{_TORCH_FOLDER}')]
    start = (outside or starts)[-1]
    code = lines[start + 1] if start + 1 < len(lines) and start + 1 not in starts else ""
    return f"{lines[start]}: {code}" if code else lines[start]


def refuse(node: Node, reason: str, *, operation: str | None = None) -> LegalizationError:
    """The error for a node, with the operation and the user's line; to be raised by the caller."""
    return LegalizationError(operation or operation_name(node), user_line(node), reason)


def map_tensors(function: Callable[[Tensor], object], tree: object) -> Any:
    """Nested values with each tensor replaced, slices included."""
    if isinstance(tree, _LEAF_TYPES):
        return function(tree) if isinstance(tree, Tensor) else tree

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, slice):
            return slice(*(apply(part) for part in (leaf.start, leaf.stop, leaf.step)))
        return leaf

    return pytree.tree_map(apply, tree)

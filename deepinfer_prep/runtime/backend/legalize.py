"""The pass: every fp8 value of a Dynamo graph becomes a uint8 value, in place."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from deepinfer_prep.runtime.backend.byte_formats import carried
from deepinfer_prep.runtime.backend.emitter import Emitter
from deepinfer_prep.runtime.backend.handlers.constructors import is_constructor, replace_constructor
from deepinfer_prep.runtime.backend.handlers.kernel_launches import adopt_kernel
from deepinfer_prep.runtime.backend.node_values import (
    holds_8_bit_floats,
    holds_carried,
    leaves,
    logical_value,
    refuse,
    refused_reason,
    target_name,
)
from deepinfer_prep.runtime.backend.operations import ENTERED, KERNELS
from deepinfer_prep.runtime.backend.rewriter import Rewriter
from deepinfer_prep.runtime.backend.scope import Scope
from deepinfer_prep.runtime.backend.storage.layout import as_bytes
from deepinfer_prep.runtime.backend.subgraphs import attribute, graph_modules, operand_subgraphs
from deepinfer_prep.runtime.backend.vmap_regions import regions, rewrite_region

_KNOWN_ROOTS = frozenset({"torch", "_operator", "operator", "builtins", "math"})


def modules_with_fp8(module: GraphModule) -> set[int]:
    """The ids of the graph modules, `module` or nested in it, in which an fp8 value may occur."""
    return {
        id(part)
        for part in graph_modules(module)
        if any(_involves_fp8(part, node) or _is_opaque(node) for node in part.graph.nodes)
    }


def legalize(scope: Scope, with_fp8: set[int]) -> None:
    """Rewrite the nodes of one graph. Sub-graphs are left to scopes of their own."""
    for region in regions(scope.old_nodes):
        if len(region) > 1 and any(_involves_fp8(scope.module, node) for node in region):
            rewrite_region(scope, region, partial(_visit_attribute, scope))
            continue
        for node in region:
            with scope.graph.inserting_before(node):
                _visit(scope, node, with_fp8)


def _visit(scope: Scope, node: Node, with_fp8: set[int]) -> None:
    reason = refused_reason((logical_value(node), node.args, node.kwargs))
    if reason is not None:
        raise refuse(node, reason)
    if node.op == "get_attr":
        _visit_attribute(scope, node)
    elif node.target is operator.getitem and scope.is_nested(node.args[0]):
        scope.replace(node, scope.item(node.args[0], node.args[1]))
    elif isinstance(node.target, HigherOrderOperator):
        _visit_higher_order(scope, node, with_fp8)
    elif is_constructor(node):
        replace_constructor(scope, node)
    elif node.op in ("call_function", "call_method", "call_module"):
        _visit_call(scope, node)
    elif node.op == "output":
        scope.adopt(node)


def _visit_attribute(scope: Scope, node: Node) -> None:
    """A tensor that the graph holds: a parameter or constant; fp8 becomes a uint8 view under its name."""
    name = str(node.target)
    held = attribute(scope.module, name)
    if not isinstance(held, Tensor):
        return
    if logical_value(node) is None:
        node.meta["example_value"] = scope.fake_mode.from_tensor(held)
    if carried(held) is None:
        return
    if "." in name:
        raise refuse(node, "the fp8 tensor belongs to a sub-module; " + _INLINE)
    registered = name in scope.module._parameters or name in scope.module._buffers
    delattr(scope.module, name)
    if registered:
        scope.module.register_buffer(name, as_bytes(held), persistent=False)
    else:
        setattr(scope.module, name, as_bytes(held))


def _visit_higher_order(scope: Scope, node: Node, with_fp8: set[int]) -> None:
    name = target_name(node.target).removeprefix("torch.ops.higher_order.")
    inside = any(id(part) in with_fp8 for part in operand_subgraphs(scope.module, node))
    if name in KERNELS:
        adopt_kernel(scope, node)
    elif name in ENTERED or not (inside or _involves_fp8(scope.module, node)):
        scope.adopt(node)
    else:
        raise refuse(
            node,
            "fp8 values do not pass through this higher-order operation; convert them before it, or give it "
            "x.view(torch.uint8)",
        )


def _visit_call(scope: Scope, node: Node) -> None:
    opaque = _is_opaque(node)
    if not opaque and not _involves_fp8(scope.module, node):
        scope.adopt(node)
        return
    _require_plain_tensors(node)
    if node.op == "call_module" and list(scope.module.get_submodule(str(node.target)).state_dict()):
        raise refuse(node, "a module that holds tensors meets an fp8 value; " + _INLINE)
    emitter = Emitter(scope, node)
    rewriter = Rewriter(emitter)
    carriers = emitter.tree_of(rewriter.replay())
    if opaque and not rewriter.touched:
        emitter.retract()
        scope.adopt(node)
    else:
        scope.replace(node, carriers)


def _require_plain_tensors(node: Node) -> None:
    """Refuse values that only have a meaning inside a function transform or a tensor subclass."""
    values = [logical_value(node), *(logical_value(source) for source in node.all_input_nodes)]
    for leaf in leaves(values):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            raise refuse(
                node,
                f"an fp8 value inside a function transform ({type(leaf).__name__}); convert it outside of it",
            )


def _involves_fp8(module: GraphModule, node: Node) -> bool:
    """Whether an fp8 (or refused) value or type occurs in a node's arguments or result."""
    values = (logical_value(node), [logical_value(source) for source in node.all_input_nodes])
    if holds_8_bit_floats((values, node.args, node.kwargs)):
        return True
    if node.op == "get_attr":
        return holds_carried(attribute(module, str(node.target)))
    if node.op == "call_module":
        return holds_carried(list(module.get_submodule(str(node.target)).state_dict().values()))
    return False


def _is_opaque(node: Node) -> bool:
    """Whether a node calls a Python function that Dynamo was told not to look into."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return False
    module = getattr(target, "__module__", None) or type(target).__module__
    return module.partition(".")[0] not in _KNOWN_ROOTS


_INLINE = "set torch._dynamo.config.inline_inbuilt_nn_modules = True (torch's default)"

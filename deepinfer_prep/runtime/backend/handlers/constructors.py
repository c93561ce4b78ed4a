"""torch.tensor and its kin: the one way to make an fp8 tensor that torch does not dispatch."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.utils import _pytree as pytree

from deepinfer_prep.runtime.backend.byte_formats import CARRIER, carried
from deepinfer_prep.runtime.backend.encoded_numbers import encode_nested
from deepinfer_prep.runtime.backend.node_values import logical_value, refuse, target_name
from deepinfer_prep.runtime.backend.operations import CONSTRUCTORS
from deepinfer_prep.runtime.backend.scope import Scope

_DATA_NAMES = ("data", "obj")
_POSITIONAL = ("data", "dtype", "device")


def is_constructor(node: Node) -> bool:
    """Whether a node makes an fp8 tensor of Python numbers."""
    if node.op != "call_function" or target_name(node.target) not in CONSTRUCTORS:
        return False
    made = carried(_arguments(node).get("dtype"))
    return made is not None and not node.all_input_nodes


def replace_constructor(scope: Scope, node: Node) -> None:
    """The same call with the bytes of its numbers. The numbers are encoded here, by our own definition."""
    arguments = _arguments(node)
    fmt = carried(arguments.pop("dtype"))
    assert fmt is not None
    name = next(name for name in _DATA_NAMES if name in arguments)
    if arguments.pop("requires_grad", False):
        raise refuse(node, "no gradient flows into fp8 values; leave out requires_grad")
    try:
        codes = encode_nested(_plain(arguments.pop(name)), fmt)
    except TypeError as error:
        raise refuse(node, f"its data cannot be encoded as {fmt.dtype}: {error}") from error
    new = scope.graph.call_function(node.target, (codes,), {**arguments, "dtype": CARRIER})  # type: ignore[arg-type]
    scope.replace(node, scope.describe(new, node, logical_value(node)))


def _arguments(node: Node) -> dict[str, Any]:
    return {**dict(zip(_POSITIONAL, node.args, strict=False)), **node.kwargs}


def _plain(data: Any) -> Any:
    """fx's immutable lists as plain ones."""
    return pytree.tree_map(lambda leaf: leaf, list(data)) if isinstance(data, (list, tuple)) else data

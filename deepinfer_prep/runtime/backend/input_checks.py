"""What may enter a graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepinfer_prep.runtime.backend.byte_formats import carried
from deepinfer_prep.runtime.backend.node_values import logical_value, refuse


def require_supported_inputs(module: GraphModule) -> None:
    """Refuse fp8 values in tensors that are not plain ones."""
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            _require_plain(node)


def moved_storages(module: GraphModule) -> frozenset[int]:
    """Storages of inputs that do not fill them from the start, or that share them."""
    seen: set[int] = set()
    moved: set[int] = set()
    for node in module.graph.nodes:
        value = logical_value(node)
        if node.op == "placeholder" and isinstance(value, FakeTensor):
            storage = value.untyped_storage()._cdata
            if storage in seen or value.storage_offset() or not value.is_contiguous():
                moved.add(storage)
            seen.add(storage)
    return frozenset(moved)


def _require_plain(node: Node) -> None:
    value = logical_value(node)
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

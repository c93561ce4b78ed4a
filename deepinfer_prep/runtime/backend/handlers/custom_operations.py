"""Calls of operations from outside torch, by what they have declared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from deepinfer_prep.errors import LegalizationError
from deepinfer_prep.runtime.backend.byte_formats import CARRIER, carried
from deepinfer_prep.runtime.backend.calls import bind_arguments
from deepinfer_prep.runtime.backend.declarations import Declaration
from deepinfer_prep.runtime.backend.emitter import Emitter
from deepinfer_prep.runtime.backend.node_values import holds_carried, map_tensors
from deepinfer_prep.runtime.backend.storage.layout import as_bytes


def call_declared(
    emitter: Emitter,
    func: OpOverload,
    declaration: Declaration,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """A custom operation: its bytes form on bytes, checked to return bytes where it said so."""
    arguments = bind_arguments(func, args, kwargs)
    check_declared_arguments(emitter.refusal, declaration, arguments)
    value = func(*args, **kwargs)
    target = declaration.bytes_form or func
    on_bytes = target(*map_tensors(as_bytes, args), **map_tensors(as_bytes, kwargs))
    check_declared_results(emitter.refusal, declaration, value, on_bytes)
    carriers = emitter.emit(target, map_tensors(emitter.node_of, args), map_tensors(emitter.node_of, kwargs), value)
    emitter.bind(value, carriers)
    return value


def check_declared_arguments(
    refusal: Callable[[str], LegalizationError], declaration: Declaration, arguments: Mapping[str, Any]
) -> None:
    """Refuse an fp8 argument that the declaration does not name."""
    for name, argument in arguments.items():
        if holds_carried(argument) and name not in declaration.fp8_args:
            raise refusal(
                f"argument '{name}' of {declaration.name} is fp8 and not declared; declared are "
                f"{sorted(declaration.fp8_args) or 'none'}"
            )


def check_declared_results(
    refusal: Callable[[str], LegalizationError], declaration: Declaration, value: Any, on_bytes: Any
) -> None:
    """Refuse results that are not bytes where the program has fp8, or differ otherwise."""
    expected = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    found = [leaf for leaf in pytree.tree_leaves(on_bytes) if isinstance(leaf, Tensor)]
    same_count = len(expected) == len(found)
    for index, (result, actual) in enumerate(zip(expected, found, strict=False)):
        wanted = CARRIER if carried(result) is not None else result.dtype
        undeclared = carried(result) is not None and index not in declaration.fp8_results
        if undeclared or actual.dtype != wanted or actual.shape != result.shape:
            raise refusal(
                f"result {index} of {declaration.name} is {result.dtype} in the program; given bytes the "
                f"operation returns {actual.dtype}, and the declared fp8 results are "
                f"{sorted(declaration.fp8_results) or 'none'}. Declare the result and give a bytes_form that "
                "returns uint8"
            )
    if not same_count:
        raise refusal(f"{declaration.name} returns {len(found)} tensors for bytes, {len(expected)} for fp8")

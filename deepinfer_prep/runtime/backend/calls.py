"""One dispatched operation with its arguments by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from deepinfer_prep.runtime.backend.operations import Row


@dataclass(frozen=True)
class Call:
    """One dispatched operation: its overload, its row, and its arguments by name."""

    func: OpOverload
    row: Row
    arguments: dict[str, Any]

    def run(self) -> Any:
        args, kwargs = order_arguments(self.func, self.arguments)
        return self.func(*args, **kwargs)


def bind_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the schema; those left at their default are absent."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def order_arguments(func: OpOverload, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `bind_arguments`: positional as far as the schema and the values given allow."""
    positional: list[Any] = []
    rest = dict(arguments)
    for argument in func._schema.arguments:
        if argument.kwarg_only or argument.name not in rest:
            break
        positional.append(rest.pop(argument.name))
    return tuple(positional), rest


def unknown_reason(func: OpOverload) -> str:
    """Why an operation without a row is refused, and what to do about it."""
    if func.namespace in ("aten", "prims", "prim", "_c10d_functional"):
        return (
            "it is not in the table of operations on fp8 values; convert with x.to(torch.bfloat16), or work "
            "on the bytes with x.view(torch.uint8)"
        )
    return (
        f"the custom operation {func} takes or returns fp8 values and has not declared how; give it "
        f'x.view(torch.uint8), or call declare_fp8("{func._schema.name}", args=..., results=...)'
    )


def overload(name: str) -> OpOverload:
    """`aten.full.default` as an overload."""
    namespace, operation, overload = name.split(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    return found

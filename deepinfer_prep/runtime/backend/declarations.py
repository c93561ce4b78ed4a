"""What custom operations and device kernels say about their fp8 arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Declaration:
    """A custom operation or kernel that takes fp8 values as bytes.

    fp8_args: names of the arguments that may be given as uint8 where the program has fp8.
    fp8_results: positions of the results that are then uint8 where the program has fp8.
    bytes_form: what is called with the bytes; None for the operation itself.
    """

    name: str
    fp8_args: frozenset[str]
    fp8_results: frozenset[int]
    bytes_form: Callable[..., Any] | None


_DECLARED: dict[str, Declaration] = {}


def declare_fp8(
    operation: object,
    *,
    args: Iterable[str] = (),
    results: Iterable[int] = (),
    bytes_form: Callable[..., Any] | None = None,
) -> None:
    """Let the `deepinfer_neuron` backend pass fp8 tensors to a custom operation as uint8.

    operation: a custom operation ("mylib::gemm", torch.ops.mylib.gemm or one of its overloads), or an NKI
    kernel as it was given to wrap_nki. args: parameters that take the bytes of fp8 tensors. results:
    positions of the results that come back as bytes (0 for a single one). bytes_form: an operation of the
    same signature to call instead, where the eager one insists on fp8 types.

        declare_fp8("mylib::gemm", args=("weight",))
        declare_fp8("mylib::quantize", results=(0,), bytes_form=torch.ops.mylib.quantize_bytes)

    Declaring an operation again replaces what was said before.
    """
    name = _operation_name(operation)
    _DECLARED[name] = Declaration(name, frozenset(args), frozenset(results), bytes_form)


def declaration_of(operation: object) -> Declaration | None:
    """What was declared for an operation, an overload or a kernel."""
    return _DECLARED.get(_operation_name(operation))


def _operation_name(operation: object) -> str:
    """`namespace::name` without the overload; module and name for a kernel."""
    if isinstance(operation, str):
        return operation
    packet = getattr(operation, "overloadpacket", operation)
    qualified = getattr(packet, "_qualified_op_name", None)
    if isinstance(qualified, str):
        return qualified
    function = getattr(operation, "func", operation)
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        raise TypeError(f"expected an operation, its name or a kernel, found {operation!r}")
    return f"{function.__module__}.{name}"

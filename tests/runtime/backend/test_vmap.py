"""torch.vmap over fp8 values inside a compiled function equals eager bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.runtime.backend.harness import E5, E8, F8, assert_same, check, fp8, refusal, values

ONE = torch.ones(())


def _rounded(row: Tensor) -> Tensor:
    scale = row.abs().amax() / 224
    return (row / scale).to(F8).float() * scale


def _written(row: Tensor, new: Tensor) -> Tensor:
    copy = row.clone()
    copy[1:3] = new
    copy.view(torch.uint8)[0] = 0x40
    return copy


def _in_place(rows: Tensor, new: Tensor) -> Tensor:
    torch.vmap(lambda row, value: row.copy_(value))(rows, new)
    return rows.float()


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "decode": (torch.vmap(lambda row: row.float() * 2), lambda: (fp8(3, 4),)),
    "decode to bfloat16": (torch.vmap(lambda row: row.bfloat16() + 1), lambda: (fp8(3, 4),)),
    "encode": (torch.vmap(lambda row: (row * 3).to(F8)), lambda: (values(3, 4),)),
    "from one fp8 type to others": (torch.vmap(lambda row: (row.to(E5), row.float().to(E8))), lambda: (fp8(3, 4),)),
    "activation quantization": (torch.vmap(_rounded), lambda: (values(3, 8),)),
    "linear with an fp8 weight outside": (
        lambda x, weight: torch.vmap(lambda row: functional.linear(row, weight.float()))(x),
        lambda: (values(3, 8), fp8(5, 8)),
    ),
    "linear with an fp8 weight for each": (
        torch.vmap(lambda row, weight: functional.linear(row.float(), weight.float())),
        lambda: (fp8(3, 8), fp8(3, 5, 8)),
    ),
    "scaled products": (
        torch.vmap(
            lambda a, b: torch._scaled_mm(a, b.t(), scale_a=ONE, scale_b=ONE, out_dtype=torch.float32),
            randomness="same",
        ),
        lambda: (fp8(2, 16, 16), fp8(2, 16, 16, seed=1)),
    ),
    "other dimensions": (
        torch.vmap(lambda a, b: torch.where(a == b, a, b), in_dims=(1, 0), out_dims=1),
        lambda: (fp8(4, 3), fp8(3, 4, seed=1)),
    ),
    "nested": (
        torch.vmap(torch.vmap(lambda a, b: a.float() * b.float()), in_dims=(0, None)),
        lambda: (fp8(2, 3, 4), fp8(3, 4, seed=1)),
    ),
    "moves": (
        torch.vmap(lambda row: torch.cat([part.roll(1) for part in row.chunk(2)]).view(2, -1).t()),
        lambda: (fp8(3, 8),),
    ),
    "several results": (torch.vmap(lambda row: (row.isnan(), row.view(torch.uint8), row)), lambda: (fp8(3, 4),)),
    "writes into copies": (torch.vmap(_written), lambda: (fp8(3, 4), values(3, 2))),
    "writes into an argument": (_in_place, lambda: (fp8(3, 4), values(3, 4))),
    "before and after": (
        lambda x: torch.vmap(lambda row: row.to(F8))(x.to(F8).float() * 0.7).view(torch.uint8),
        lambda: (values(3, 4),),
    ),
    "bytes": (
        lambda x: torch.vmap(lambda row: row.flip(0))(x.view(torch.uint8)).view(F8).float(),
        lambda: (fp8(4, 8),),
    ),
    "one element": (torch.vmap(lambda element: element.float() + 1), lambda: (fp8(1),)),
    "chunks": (torch.vmap(lambda row: row.float().to(F8), chunk_size=2), lambda: (fp8(4, 3),)),
}


@pytest.mark.parametrize(("program", "arguments"), PROGRAMS.values(), ids=PROGRAMS)
def test_vmap(program: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> None:
    check(program, arguments, fullgraph=True)


def test_a_compiled_function_under_vmap() -> None:
    run = torch.compile(lambda row: (row.float() * 2).to(F8), backend="deepinfer_neuron")
    x = fp8(3, 4)
    assert_same(torch.vmap(lambda row: (row.float() * 2).to(F8))(x), torch.vmap(run)(x))


def test_what_has_no_byte_form_is_refused_inside_vmap_too() -> None:
    error = refusal(torch.vmap(lambda row: row.abs()), fp8(3, 4))
    assert "arithmetic on fp8 values" in str(error)
    assert torch._C._functorch.peek_interpreter_stack() is None
    check(torch.vmap(lambda row: row.float()), lambda: (fp8(3, 4),))


def test_other_transforms_are_refused() -> None:
    gradient = torch.func.grad(lambda x: (x.to(F8).float() * x).sum())
    assert "function transform" in str(refusal(gradient, values(4)))

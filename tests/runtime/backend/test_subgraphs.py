"""Higher-order operations: the sub-graphs are legalized with the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from tests.runtime.backend.harness import F8, SATURATES, assert_same, check, fp8, refusal, run_compiled, values


@pytest.mark.parametrize("choice", [True, False])
def test_cond_that_returns_fp8(choice: bool) -> None:
    def program(choose: Tensor, x: Tensor, y: Tensor) -> Any:
        def double(a: Tensor, b: Tensor) -> Any:
            return (a.float() * 2).to(F8), torch.cat([a, b])

        def keep(a: Tensor, b: Tensor) -> Any:
            return a.clone(), torch.cat([b, a])

        return torch.cond(choose, double, keep, (x, y))

    check(program, lambda: (torch.tensor(choice), fp8(4, 8, scale=1), fp8(2, 8)))


def test_cond_with_fp8_born_inside() -> None:
    def program(choose: Tensor, x: Tensor) -> Tensor:
        return torch.cond(choose, lambda a: a.to(F8).float(), lambda a: a + 1, (x,))

    check(program, lambda: (torch.tensor(True), values(4, 8)))


def test_cond_in_a_cond() -> None:
    def program(choose: Tensor, x: Tensor) -> Tensor:
        def inner(a: Tensor) -> Tensor:
            return torch.cond(a.float().sum() > 0, lambda b: b.float(), lambda b: -b.float(), (a,))

        return torch.cond(choose, inner, lambda a: a.float() * 3, (x,))

    check(program, lambda: (torch.tensor(True), fp8(4, 8)))


def test_while_loop_that_carries_fp8() -> None:
    def program(x: Tensor) -> Any:
        def step(i: Tensor, a: Tensor) -> Any:
            return i + 1, (a.float() * 0.5).to(F8)

        return while_loop(lambda i, a: i < 3, step, (torch.tensor(0), x))

    check(program, lambda: (fp8(4, 8),))


def test_map() -> None:
    check(lambda x, y: map_rows(lambda a, b: a.float() + b.float(), x, y), lambda: (fp8(4, 8), fp8(8, seed=1)))


def test_scan() -> None:
    """Eager scan needs a gather that torch does not have for fp8."""

    def step(carry: Tensor, row: Tensor) -> Any:
        total = carry + row.float()
        return total, (total * 0.25).to(F8)

    x, start = fp8(4, 8), torch.zeros(8)
    totals = torch.cumsum(x.float(), 0)
    carry, rows = run_compiled(lambda a, b: scan(step, b, a), (x, start))
    assert_same((totals[-1], (totals * 0.25).to(F8)), (carry, rows))


def test_checkpoint_that_returns_fp8() -> None:
    def program(x: Tensor) -> Any:
        y = torch.utils.checkpoint.checkpoint(lambda a: (a.float() * 2).to(F8), x, use_reentrant=False)
        return y, y.float()

    check(program, lambda: (fp8(4, 8, scale=1),))


def test_a_region_used_twice_is_legalized_once() -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y.to(F8)])

    def program(x: Tensor, y: Tensor) -> Tensor:
        return region(x, y).float() + region(x.flip(0), y * 2).float()

    check(program, lambda: (fp8(2, 8), values(2, 8, scale=1)))


def test_grad_mode_and_autocast_regions() -> None:
    def program(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            a = x.float()
        with torch.autocast("cpu", torch.bfloat16):
            b = x.bfloat16() @ w.bfloat16()
            c = x.to(F8, copy=True)
        return a, b, c

    check(program, lambda: (fp8(8, 8), fp8(8, 8, seed=1)))


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="this torch asks for a GPU when it traces flex_attention on fp8",
)
def test_flex_attention_on_fp8_is_refused() -> None:
    def program(q: Tensor, k: Tensor) -> Tensor:
        return flex_attention(q, k, k)

    error = refusal(program, fp8(1, 1, 16, 16), fp8(1, 1, 16, 16))
    assert error.operation == "torch.ops.higher_order.flex_attention"


def test_flex_attention_beside_fp8_is_let_alone() -> None:
    def program(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
        return flex_attention(q, k, k) * scale.float()

    q, k, scale = values(1, 1, 16, 16), values(1, 1, 16, 16, seed=1), fp8(16)
    compiled = run_compiled(program, (q, k, scale), options={"base_backend": "eager"})
    torch.testing.assert_close(compiled, program(q, k, scale))


@pytest.mark.skipif(not SATURATES, reason="this torch makes NaN of values beyond 464")
def test_saturation_inside_a_sub_graph() -> None:
    def program(choose: Tensor, x: Tensor) -> Tensor:
        return torch.cond(choose, lambda a: (a.float() * 1e4).to(F8), lambda a: a.clone(), (x,))

    check(program, lambda: (torch.tensor(True), fp8(4, 8)))

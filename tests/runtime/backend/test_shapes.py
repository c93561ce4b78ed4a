"""Shapes that change: torch.compile's defaults give every shape a static graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.backend.harness import F8, assert_same, fp8, refusal, values
from tests.runtime.backend.stand_in import Compiled


def step(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Uses sizes in every way: in a view, in a slice, in arithmetic, as a shape of something new."""
    rows = x.shape[0]
    product = x @ weight.float().t()
    half = product[: rows // 2 + 1].reshape(-1, product.shape[1])
    return half * rows, torch.full((rows, 2), 1.5).to(F8)


def write(cache: Tensor, row: Tensor) -> Tensor:
    cache[-1].copy_(row[: cache.shape[1]])
    return cache.float().sum(0)


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_every_shape_is_compiled_statically(dynamic: bool | None, compiled: list[Compiled]) -> None:
    run = torch.compile(step, backend="deepinfer_neuron", fullgraph=True, dynamic=dynamic)
    weight = fp8(16, 8, seed=1)
    for rows in (4, 5, 6, 5, 4):
        x = values(rows, 8, seed=rows)
        assert_same(step(x, weight), run(x, weight))
    assert len(compiled) == 3


def test_fp8_inputs_that_change_their_size_and_are_written_to(compiled: list[Compiled]) -> None:
    run = torch.compile(write, backend="deepinfer_neuron", fullgraph=True)
    for rows, columns in ((3, 8), (4, 8), (4, 6), (3, 8)):
        expected, actual = fp8(rows, columns, seed=rows), fp8(rows, columns, seed=rows)
        row = values(8)
        assert_same(write(expected, row), run(actual, row))
        assert_same(expected, actual)
    assert len(compiled) == 3


def test_the_limit_of_recompilations_is_said(compiled: list[Compiled], caplog: pytest.LogCaptureFixture) -> None:
    run = torch.compile(lambda x: x.float() * 2, backend="deepinfer_neuron")
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (2, 3, 4):
            x = fp8(rows, 4)
            assert_same(x.float() * 2, run(x))
    assert len(compiled) == 2
    assert "at most 2 of one function" in caplog.text


def test_a_number_that_changes_is_refused() -> None:
    def program(x: Tensor, position: int) -> Tensor:
        return x.float() * position

    run = torch.compile(program, backend="deepinfer_neuron")
    x = fp8(4, 8)
    run(x, 3)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="as tensors"):
        run(x, 4)


def test_sub_graphs_of_dynamic_sizes_are_refused() -> None:
    def program(x: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag, lambda a: a.float(), lambda a: a.float() * 2, (x,))

    error = refusal(program, fp8(4, 8), torch.tensor(True), dynamic=True)
    assert "dynamic=False" in str(error)


def assert_equal_for_shapes(program: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    """Compiled by torch's defaults, a program equals eager on each of the shapes."""
    run = torch.compile(program, backend="deepinfer_neuron")
    for shape in shapes:
        assert_same(program(fp8(*shape)), run(fp8(*shape)))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.view(x.shape[1], -1).float(),
        lambda x: torch.cat([x, x[: x.shape[0] - 1]]).float(),
        lambda x: (x.float() / x.numel()).to(F8),
        lambda x: x.expand(2, *x.shape).contiguous(),
        lambda x: x.float().mean(0, keepdim=True).expand(x.size(0), -1).to(F8),
    ],
)
def test_sizes_in_arithmetic(program: Callable[..., Any]) -> None:
    assert_equal_for_shapes(program, [(4, 6), (5, 6), (5, 8), (4, 6)])

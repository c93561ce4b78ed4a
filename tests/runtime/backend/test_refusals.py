"""What is refused, and what the error says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.backend.harness import F8, fp8, refusal, run_compiled

INDEX = torch.tensor([3, 1, 1])


REFUSED: dict[str, Callable[..., Any]] = {
    "gather": lambda x, i: x.gather(1, i),
    "scatter": lambda x, i: x.scatter(1, i, x),
    "scatter value": lambda x, i: x.scatter(1, i, 1.0),
    "scatter_": lambda x, i: x.scatter_(1, i, x.clone()),
    "masked_fill": lambda x, i: x.masked_fill(i == 0, 1.0),
    "masked_fill_": lambda x, i: x.masked_fill_(i == 0, 1.0),
    "index_copy": lambda x, i: x.index_copy(0, i[0, :1], x[:1]),
    "index_fill": lambda x, i: x.index_fill(0, i[0, :1], 1.0),
    "index_add": lambda x, i: x.index_add(0, i[0, :1], x[:1]),
    "scatter_add": lambda x, i: x.scatter_add(1, i, x),
    "take_along_dim": lambda x, i: x.take_along_dim(i, 1),
    "tril": lambda x, i: x.tril(),
    "topk": lambda x, i: x.topk(1),
    "sort": lambda x, i: x.sort(),
    "argmax": lambda x, i: x.argmax(),
    "lt": lambda x, i: x < x,
    "le number": lambda x, i: x <= 0,
    "isfinite": lambda x, i: x.isfinite(),
    "isinf": lambda x, i: x.isinf(),
    "signbit": lambda x, i: x.signbit(),
    "add": lambda x, i: x + x,
    "add number": lambda x, i: x + 1,
    "mul": lambda x, i: x * 2,
    "neg": lambda x, i: -x,
    "sum": lambda x, i: x.sum(),
    "amax": lambda x, i: x.amax(),
    "max": lambda x, i: x.max(),
    "clamp": lambda x, i: x.clamp(0, 1),
    "maximum": lambda x, i: torch.maximum(x, x),
    "reflection pad": lambda x, i: torch.nn.functional.pad(x, (1, 1), mode="reflect"),
    "where float": lambda x, i: torch.where(i == 0, x, x.float()),
    "cat float": lambda x, i: torch.cat([x, x.float()]),
    "stack float": lambda x, i: torch.stack([x, x.float()]),
    "setitem index float": lambda x, i: x.__setitem__(i[0, :1], x[:1].float()),
    "fp8 and float": lambda x, i: x * x.float(),
    "eq float": lambda x, i: x == x.float(),
}
"""What eager torch refuses as well."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str) -> None:
    program, args = REFUSED[name], (fp8(4, 8), torch.zeros(4, 8, dtype=torch.int64))
    with pytest.raises((NotImplementedError, RuntimeError)):
        program(*args)
    # Some of it already fails when Dynamo traces, before the backend is asked.
    with pytest.raises(
        Exception, match=r"cannot be compiled|TorchRuntimeError|Promotion|float8|fake tensor|not implemented"
    ):
        run_compiled(program, args)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "abs": lambda x: x.abs(),
    "accumulate": lambda x: x.index_put((INDEX[:1],), x[:1], accumulate=True),
    "eye": lambda x: torch.eye(3, dtype=F8),
    "metadata": lambda x: x.clone().t_().float(),
}
"""What eager torch does, in fp8, and the backend does not."""


@pytest.mark.parametrize("name", ARITHMETIC)
def test_other_refusals_name_the_operation_and_the_line(name: str) -> None:
    error = refusal(ARITHMETIC[name], fp8(4, 8))
    assert f'"{name}": lambda' in error.where
    assert __file__ in error.where
    assert error.operation in str(error)


def test_the_line_is_the_innermost_one_outside_torch() -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, torch.zeros(4, 1, dtype=torch.int64))  # this line

    error = refusal(lambda x: helper(x.clone()).float(), fp8(4, 8))
    assert "# this line" in error.where
    assert "helper" in error.where
    assert error.operation == "Tensor.gather (aten.gather.default)"
    assert "x.view(torch.uint8)" in str(error)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_fnuz_types_are_refused(dtype: torch.dtype) -> None:
    error = refusal(lambda x: x.float(), torch.zeros(4).to(dtype))
    assert str(dtype) in str(error)
    assert "L['x']" in error.operation
    error = refusal(lambda x: x.to(dtype).float(), torch.zeros(4))
    assert "Tensor.to" in error.operation


def test_packed_fp4_is_refused() -> None:
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert "x2: packed fp4" in str(refusal(lambda x: x.view(torch.uint8), packed))

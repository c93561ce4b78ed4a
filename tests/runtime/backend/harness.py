"""Running a program eagerly and compiled, and comparing everything that it returns or writes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils import _pytree as pytree

from deepinfer_prep.errors import LegalizationError

F8 = torch.float8_e4m3fn
E8 = torch.float8_e8m0fnu
E5 = torch.float8_e5m2

SATURATES = bool(torch.tensor(1000.0).to(F8).view(torch.uint8) == 0x7E)
"""Whether the installed torch saturates as we do; before 2.13 it makes NaN of what lies beyond 464."""

Arguments = Callable[[], tuple[Any, ...]]


def values(*shape: int, seed: int = 0, scale: float = 4.0) -> Tensor:
    """Normal float32 values, signs and zeros included, all within the range of e4m3fn."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator) * scale
    return torch.where(torch.rand(*shape, generator=generator) < 0.1, 0.0, drawn).clamp(-448, 448)


def fp8(*shape: int, seed: int = 0, scale: float = 4.0) -> Tensor:
    """Random e4m3fn values."""
    return values(*shape, seed=seed, scale=scale).to(F8)


def all_codes(dtype: torch.dtype = F8) -> Tensor:
    """All 256 codes of an 8-bit type, in order."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bits as integers, with all NaNs made equal: NaN payloads are nobody's promise."""
    if tensor.is_complex():
        return bits(torch.view_as_real(tensor))
    if not tensor.is_floating_point():
        return tensor
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    raw = tensor.contiguous().view(integers[tensor.element_size()])
    nan = tensor.to(torch.float64).isnan() if tensor.element_size() == 1 else tensor.isnan()
    return torch.where(nan, torch.full_like(raw, -1 if raw.dtype != torch.uint8 else 0x7F), raw)


def assert_same(expected: Any, actual: Any) -> None:
    """Equal structure, types and shapes, and equal bit for bit."""
    left, left_spec = pytree.tree_flatten(expected)
    right, right_spec = pytree.tree_flatten(actual)
    assert left_spec == right_spec
    for first, second in zip(left, right, strict=True):
        if not isinstance(first, Tensor):
            assert first == second
            continue
        assert (first.dtype, first.shape, first.device) == (second.dtype, second.shape, second.device)
        assert torch.equal(bits(first.detach()), bits(second.detach())), f"{first}\n{second}"


def run_compiled(program: Callable[..., Any], args: tuple[Any, ...], **keywords: Any) -> Any:
    """The program's result under the backend."""
    return torch.compile(program, backend="deepinfer_neuron", **keywords)(*args)


def check(program: Callable[..., Any], arguments: Arguments, *, calls: int = 1, **keywords: Any) -> None:
    """Compiled and eager agree on results and on what is written into the arguments, for each of `calls`."""
    eager_args, compiled_args = arguments(), arguments()
    compiled = torch.compile(program, backend="deepinfer_neuron", **keywords)
    for _ in range(calls):
        assert_same(program(*eager_args), compiled(*compiled_args))
        assert_same(eager_args, compiled_args)


def refusal(program: Callable[..., Any], *args: Any, **keywords: Any) -> LegalizationError:
    """The error that stops a program from being compiled."""
    with pytest.raises(BackendCompilerFailed) as caught:
        run_compiled(program, args, **keywords)
    inner = caught.value.inner_exception
    assert isinstance(inner, LegalizationError), inner
    return inner

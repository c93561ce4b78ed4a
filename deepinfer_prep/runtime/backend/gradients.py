"""Gradients end at fp8 values: forward results are eager's, a backward pass stops with an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer_prep.runtime.backend.storage.outputs import OutputView


class NoBackward(torch.autograd.Function):
    """The identity with a backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "deepinfer_neuron does not pass gradients through fp8 values, and this graph converts tensors that "
            "require a gradient to or from fp8. Call it under torch.inference_mode() or torch.no_grad(), or "
            "detach what goes into it."
        )


def without_gradient(
    run: Callable[..., tuple[Any, ...]], outputs: Sequence[OutputView]
) -> Callable[..., tuple[Any, ...]]:
    """Run without autograd; results that eager would give a gradient get one that refuses to flow."""

    def guarded(*args: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            results = run(*args)
        anchor = next((arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad), None)
        if anchor is None or not torch.is_grad_enabled():
            return results
        return tuple(
            _refuse_backward(result, anchor) if view.with_gradient and view.argument is None else result
            for result, view in zip(results, outputs, strict=True)
        )

    return guarded


def _refuse_backward(value: Tensor, anchor: Tensor) -> Tensor:
    tied: Tensor = NoBackward.apply(value, anchor)  # type: ignore[no-untyped-call]
    return tied

"""DeepInfer's `neuron_compile`: the backend of torch.compile, which importing this module registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.registry import list_backends, register_backend
from torch.fx import GraphModule

from deepinfer_prep.runtime import backend
from deepinfer_prep.runtime.backend.codecs import encode_e4m3fn
from deepinfer_prep.runtime.backend.compile import legalize_in_place
from deepinfer_prep.runtime.backend.legalize import modules_with_fp8

__all__ = ["deepinfer_neuron", "encode_codes", "legalize_fp8"]


def encode_codes(x: torch.Tensor) -> torch.Tensor:
    """The e4m3fn codes of `x`, rounded to nearest even, as int32 numbers for putting bytes together in a graph."""
    return encode_e4m3fn(x).to(torch.int32)


def legalize_fp8(gm: GraphModule) -> bool:
    """Rewrite a Dynamo graph in place so that every fp8 value is uint8, inputs and outputs as well.

    Returns:
        Whether the graph changed; one without fp8 values is left as it is.

    Raises:
        LegalizationError: an operation has no exact form on bytes.
    """
    with_fp8 = modules_with_fp8(gm)
    if not with_fp8:
        return False
    legalize_in_place(gm, with_fp8)
    return True


def deepinfer_neuron(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile one Dynamo graph; `kwargs` are those that torch.compile hands to a backend: `options`, `mode`."""
    return backend.deepinfer_neuron(gm, example_inputs, **kwargs)


if "deepinfer_neuron" not in list_backends(exclude_tags=()):
    register_backend(deepinfer_neuron)

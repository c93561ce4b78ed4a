"""NKI kernels as PyTorch callables, each wrapped once in a process.

torch-neuronx keeps a registry that grows with every wrap_nki call, and its cache of eager compilations does
not tell grids apart: so there is one wrapper for each kernel, with one grid.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from deepinfer_prep.runtime import neuron, settings

_GRIDS = {
    "fp8_linear": ("blockquant", 1),
    "fp8_linear_2core": ("blockquant", 2),
    "fp8_linear_raw": ("blockquant", 1),
    "fp8_linear_raw_2core": ("blockquant", 2),
    "fp4_linear": ("blockquant", 1),
    "fp4_linear_2core": ("blockquant", 2),
    "fp4_linear_2core_gated": ("blockquant", 2),
    "fp8_linear_block128": ("blockquant", 1),
    "fp8_linear_block128_2core": ("blockquant", 2),
    "hc_expand": ("hc_expand", 1),
    "hc_collapse": ("hc_collapse", 1),
    "hc_attn_out": ("hc_attn_out", 1),
    "hc_mixes": ("hc_mixes", 1),
}
"""Kernel -> its module, and how many cores it is launched on."""

# A module's attributes, unlike a dict's entries, may appear while torch.compile traces a first call.
_wrapped = types.ModuleType("wrapped_kernels")


def kernel(name: str) -> Callable[..., Any]:
    """The callable of a kernel, launched on the cores it is written for.

    Raises:
        NeuronUnavailableError: no installed package can run NKI kernels.
    """
    if not hasattr(_wrapped, name):
        _wrap(name)
    return getattr(_wrapped, name)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _wrap(name: str) -> bool:
    module, cores = _GRIDS[name]
    wrap_nki = neuron.wrap_nki()
    found = importlib.import_module(f"deepinfer_prep.kernels.{module}")
    function = getattr(found, name if module == "blockquant" else "kernel")
    # The wrapper is subscripted, not the kernel, and with a tuple: releases differ on everything else.
    setattr(_wrapped, name, wrap_nki(function)[(cores,)])
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def gemm_kernels() -> bool:
    """Whether the switches let GEMM kernels run."""
    return settings.gemm_kernels()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def two_core_gemm() -> bool:
    """Whether the switches and the machine let two-core GEMM kernels run."""
    return settings.two_core_gemm() and neuron.physical_cores() >= 2


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def hc_kernels() -> bool:
    """Whether the switches let hyper-connection kernels run."""
    return settings.hc_kernels()

"""NKI kernels as PyTorch callables, each wrapped once in a process.

torch-neuronx keeps a registry that grows with every wrap_nki call, and its cache of eager compilations does
not tell grids apart: so there is one wrapper for each kernel, with one grid.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from deepinfer_prep.runtime import neuron, settings

# A module's attributes, unlike a dict's entries, may appear while torch.compile traces a first call.
_wrapped = types.ModuleType("wrapped_kernels")
_lock = threading.Lock()


def kernel(name: str) -> Callable[..., Any]:
    """The callable of a kernel: the `kernel` of the module of that name, else a function of `kernels/blockquant.py`.

    `_2core` kernels are launched on two cores, other GEMMs on one, the rest on as many as a logical core has.

    Raises:
        NeuronUnavailableError: no installed package can run NKI kernels.
    """
    if not hasattr(_wrapped, name):
        _wrap(name)
    return getattr(_wrapped, name)  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _wrap(name: str) -> bool:
    if importlib.util.find_spec(f"deepinfer_prep.kernels.{name}") is not None:
        module, attribute, cores = name, "kernel", min(2, neuron.physical_cores())
    else:
        module, attribute, cores = "blockquant", name, 2 if "_2core" in name else 1
    with _lock:
        if not hasattr(_wrapped, name):
            wrap_nki = neuron.wrap_nki()
            kernel_function = getattr(importlib.import_module(f"deepinfer_prep.kernels.{module}"), attribute)
            # The wrapper is subscripted, not the kernel, and with a tuple: releases differ on everything else.
            setattr(_wrapped, name, wrap_nki(kernel_function)[(cores,)])
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def norm_kernels() -> bool:
    """Whether the switches let norm and SwiGLU kernels run."""
    return settings.norm_kernels()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def attention_kernels() -> bool:
    """Whether the switches let attention, index and pool kernels run."""
    return settings.attention_kernels()

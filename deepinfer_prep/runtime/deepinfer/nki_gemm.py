"""DeepInfer's `nki_gemm`: block-quantized GEMMs.

`ENABLED` and `TWO_CORE` may be set; they are the switches `DEEPINFER_NEURON_NKI_GEMM` and `DEEPINFER_NEURON_BQ_2CORE`.
"""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_prep.runtime import gemm as _gemm
from deepinfer_prep.runtime import kernel_launch, neuron, settings
from deepinfer_prep.runtime.deepinfer import switches
from deepinfer_prep.runtime.gemm import gemm, linear_qdq, linear_qdq_gated, supported

__all__ = [
    "ENABLED",
    "TWO_CORE",
    "gemm",
    "has_kernel",
    "linear_qdq",
    "linear_qdq_gated",
    "linear_qdq_raw",
    "prepare_model",
    "supported",
]

ENABLED: bool
"""Whether GEMM kernels may run."""
TWO_CORE: bool
"""Whether those on two cores may."""
switches.install(
    __name__,
    ENABLED=switches.Switch("DEEPINFER_NEURON_NKI_GEMM", settings.gemm_kernels),
    TWO_CORE=switches.Switch("DEEPINFER_NEURON_BQ_2CORE", settings.two_core_gemm),
)


def prepare_model(model: nn.Module) -> int:
    """Attach `_nki_scale` and `_nki_weight` to every weight that a kernel takes; 0 and nothing where not `ENABLED`."""
    return _gemm.prepare_model(model) if settings.gemm_kernels() else 0


def has_kernel(w: torch.Tensor | None) -> bool:
    """Whether a kernel runs with a weight: it is prepared and on a Neuron device, and kernels are `ENABLED`."""
    return w is not None and neuron.holds(w) and _gemm.has_kernel(w) and kernel_launch.gemm_kernels()


def linear_qdq_raw(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`linear_qdq` for a bare weight, uint8 [n, k] or [n, k/2], and its kernel scale."""
    return _gemm.linear_qdq_raw(x, weight, scale)

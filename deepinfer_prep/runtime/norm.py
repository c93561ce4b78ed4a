"""RMS norm and SwiGLU: kernels on a Neuron device, the same in torch elsewhere and in compiled graphs.

Inside a compiled graph a call of a kernel costs 0.1 to 0.2 ms, many times what a compiler makes of the same in torch:
kernels run only where operations run one by one. `DEEPINFER_NEURON_NKI_NORM=0` turns them off there, too. They bake
DeepSeek-V4.1's constants in: 1e-20 is added to a mean square, gate is at most 10 and up lies within -10 and 10.
"""

from __future__ import annotations

import torch

from deepinfer_prep.kernels import constants, norm_reference
from deepinfer_prep.runtime import kernel_launch, neuron

__all__ = ["rmsnorm", "rmsnorm_supported", "swiglu", "swiglu_supported"]

_WIDEST = 8192
"""Columns of a row that the norm kernel takes: its tiles of them lie beside one another on a partition."""


def rmsnorm_supported(x: torch.Tensor, eps: float) -> bool:
    """Whether the kernel norms x: bf16 on a Neuron device, rows of up to 8192, eps 1e-20, kernels not turned off.

    Never while a graph is compiled.
    """
    return eps == constants.NORM_EPS and x.shape[-1] <= _WIDEST and _on_kernel(x)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x divided by the root mean square of its row, times weight, computed in fp32 and rounded once.

    Args:
        x: bf16 [..., d].
        weight: bf16 [d].

    Returns:
        bf16 [..., d].
    """
    if rmsnorm_supported(x, constants.NORM_EPS):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return kernel_launch.kernel("rmsnorm")(rows, weight.bfloat16().contiguous()).reshape(x.shape)  # type: ignore[no-any-return]
    return norm_reference.rmsnorm(x, weight)  # type: ignore[no-any-return]


def swiglu_supported(gate: torch.Tensor, limit: float) -> bool:
    """Whether the kernel computes it: bf16 on a Neuron device, a limit of 10, kernels not turned off.

    Never while a graph is compiled.
    """
    return limit == constants.SWIGLU_LIMIT and _on_kernel(gate)


def swiglu(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, both limited, computed in fp32 and rounded once.

    Args:
        gate: bf16 [..., h].
        up: bf16 [..., h].
        weight: fp32 [...], a routing weight of each row that is multiplied in before the rounding; in torch.

    Returns:
        bf16 [..., h].
    """
    if weight is not None:
        return norm_reference.swiglu_weighted(gate, up, weight)  # type: ignore[no-any-return]
    if swiglu_supported(gate, constants.SWIGLU_LIMIT):
        rows = [part.reshape(-1, gate.shape[-1]).contiguous() for part in (gate, up)]
        return kernel_launch.kernel("swiglu")(*rows).reshape(gate.shape)  # type: ignore[no-any-return]
    return norm_reference.swiglu(gate, up)  # type: ignore[no-any-return]


def _on_kernel(tensor: torch.Tensor) -> bool:
    fits = tensor.dtype == torch.bfloat16 and tensor.numel() > 0
    return fits and neuron.holds(tensor) and not torch.compiler.is_compiling() and kernel_launch.norm_kernels()

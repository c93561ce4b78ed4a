"""Torch references for RMS norm and SwiGLU. The `*_values` functions take the dtype to compute in.

In float64 they serve as oracles.
"""

import torch
from torch import Tensor

from .constants import NORM_EPS, SWIGLU_LIMIT


def rmsnorm_values(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`rmsnorm` computed in `dtype` without a rounding of its result: [..., d]."""
    wide = x.to(dtype)
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + NORM_EPS)
    return wide * inverse * weight.to(dtype)


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    """x divided by the root mean square of its row, times weight: x bf16 [..., d], weight bf16 [d] -> bf16 [..., d].

    NORM_EPS is added to the mean square. Computed in fp32 and rounded once, to the type of x.
    """
    return rmsnorm_values(x, weight, torch.float32).to(x.dtype)


def swiglu_values(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """`swiglu` computed in `dtype` without a rounding of its result: [..., h]."""
    limited = gate.to(dtype).clamp(max=SWIGLU_LIMIT)
    return limited * torch.sigmoid(limited) * up.to(dtype).clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of an expert: gate and up bf16 [..., h] -> bf16 [..., h].

    gate is at most SWIGLU_LIMIT, up within it on both sides. Computed in fp32 and rounded once, to the type of gate.
    """
    return swiglu_values(gate, up, torch.float32).to(gate.dtype)


def swiglu_weighted(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`swiglu` times the routing weight fp32 [...] of each row, before the rounding."""
    return (swiglu_values(gate, up, torch.float32) * weight.float().unsqueeze(-1)).to(gate.dtype)

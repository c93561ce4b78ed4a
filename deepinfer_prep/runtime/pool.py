"""The compressor's pool: a kernel on a Neuron device, the same in torch elsewhere and in compiled graphs.

Inside a compiled graph a call of a kernel costs many times what a compiler makes of the same in torch.
`DEEPINFER_NEURON_NKI_ATTN=0` turns the kernel off.
"""

from __future__ import annotations

import torch

from deepinfer_prep.kernels import attention_reference as reference
from deepinfer_prep.runtime import kernel_launch, neuron

__all__ = ["compress_pool", "compress_pool_supported"]

_MOST_MEMBERS = 128
"""Tokens of a group that the kernel takes."""


def compress_pool_supported(score: torch.Tensor) -> bool:
    """Whether the kernel pools: fp32 on a Neuron device, groups of at most 128 tokens, kernels not turned off.

    Never while a graph is compiled.
    """
    fits = score.dtype == torch.float32 and score.numel() > 0 and score.shape[-2] <= _MOST_MEMBERS
    return fits and neuron.holds(score) and not torch.compiler.is_compiling() and kernel_launch.attention_kernels()


def compress_pool(score: torch.Tensor, latent: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Each group's tokens blended into one latent, channel by channel, by the softmax of their scores, in fp32.

    Args:
        score: fp32 [..., r, d] for groups of r tokens.
        latent: fp32 [..., r, d].
        dtype: bf16 or fp32; what the result is rounded to, once.

    Returns:
        `dtype` [..., d].
    """
    if not compress_pool_supported(score):
        return reference.pool_values(score, latent, torch.float32).to(dtype)  # type: ignore[no-any-return]
    name = "compress_pool" if dtype == torch.bfloat16 else "compress_pool_fp32"
    groups = [one.float().reshape(-1, *one.shape[-2:]).contiguous() for one in (score, latent)]
    pooled = kernel_launch.kernel(name)(*groups)
    return pooled.reshape(*score.shape[:-2], score.shape[-1]).to(dtype)  # type: ignore[no-any-return]

"""DeepInfer's `nki_hc`: hyper-connections with four residual streams.

`ENABLED` may be set; it is the switch `DEEPINFER_NEURON_NKI_HC`.
"""

from __future__ import annotations

import torch

from deepinfer_prep.runtime import kernel_launch, mhc, neuron, settings
from deepinfer_prep.runtime.deepinfer import switches
from deepinfer_prep.runtime.mhc import (
    expand,
    expand_supported,
    mixes,
    mixes_supported,
    pre_apply_mix,
    pre_big_fuse,
    prepare_model,
)

__all__ = [
    "ENABLED",
    "active",
    "expand",
    "expand_supported",
    "mixes",
    "mixes_supported",
    "post",
    "pre_apply_mix",
    "pre_big_fuse",
    "prepare_model",
    "split_fn",
]

ENABLED: bool
"""Whether hyper-connection kernels may run."""
switches.install(__name__, ENABLED=switches.Switch("DEEPINFER_NEURON_NKI_HC", settings.hc_kernels))


def active(t: torch.Tensor) -> bool:
    """Whether kernels are `ENABLED` and a tensor is on a Neuron device."""
    return neuron.holds(t) and kernel_launch.hc_kernels()


def post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """out[..., j, :] = post_layer_mix[..., j] * x + sum over i of comb_res_mix[..., i, j] * residual[..., i, :]."""
    return mhc.post(x, residual, post_layer_mix, comb_res_mix)


def split_fn(fn: torch.Tensor) -> None:
    """Attach `_nki_fn_hi` and `_nki_fn_lo`, the two bf16 matrices that a float32 matrix is split into."""
    mhc.attach_split(fn)

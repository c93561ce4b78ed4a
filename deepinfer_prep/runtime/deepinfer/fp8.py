"""DeepInfer's `fp8`: the range in force, compiler set-up, halving in memory."""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_prep.runtime import fp8, settings
from deepinfer_prep.runtime.compiler import configure_compiler, describe

__all__ = ["FP8_MAX", "configure_compiler", "describe", "halve_e4m3fn_bytes", "rescale_fp8_weights"]

FP8_MAX: float = settings.fp8_max()
"""The magnitude that fp8 weights keep to: `DEEPINFER_NEURON_FP8_MAX` when this module was imported, by default 224."""


def halve_e4m3fn_bytes(b: torch.Tensor) -> torch.Tensor:
    """e4m3fn(x / 2) of uint8 codes of any shape on any device, rounded to nearest even; NaN and -0 are kept."""
    return fp8.halve_e4m3fn_bytes(b)


def rescale_fp8_weights(model: nn.Module) -> int:
    """Halve the fp8 weights of a model and double their scales, once; 0 where `FP8_MAX` is above 240.

    Raises:
        RefusedError: as `deepinfer_prep.runtime.fp8.rescale_fp8_weights`.
    """
    return 0 if FP8_MAX > settings.HARDWARE_MAX else fp8.rescale_fp8_weights(model)

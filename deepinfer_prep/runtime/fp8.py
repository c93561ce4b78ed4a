"""The fp8 module of serving code: the range in force, compiler set-up, halving in memory."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from deepinfer_prep import fp8
from deepinfer_prep.runtime import settings
from deepinfer_prep.runtime.compiler import configure_compiler, describe
from deepinfer_prep.runtime.rescaling.rescale import rescale_fp8_weights

__all__ = ["FP8_MAX", "configure_compiler", "describe", "halve_e4m3fn_bytes", "rescale_fp8_weights"]

FP8_MAX: float
"""The magnitude that fp8 weights keep to, read from `DEEPINFER_NEURON_FP8_MAX` whenever it is asked for."""

Codes = TypeVar("Codes", torch.Tensor, fp8.U8, bytes)


def halve_e4m3fn_bytes(codes: Codes) -> Codes:
    """e4m3fn(x / 2) of every code, rounded to nearest even; NaN stays NaN and -0 stays -0.

    Args:
        codes: a uint8 or float8_e4m3fn tensor on any device, a numpy uint8 array, or bytes; any shape.

    Returns:
        The same kind of object with the same shape, dtype and device.

    Raises:
        TypeError: the elements are no single bytes.
    """
    if isinstance(codes, torch.Tensor):
        return _halve_tensor(codes)
    if isinstance(codes, bytes):
        return _halve_array(np.frombuffer(codes, dtype=np.uint8)).tobytes()
    return _halve_array(codes)


def _halve_tensor(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise TypeError(f"expected uint8 or float8_e4m3fn codes, found {codes.dtype}")
    host = codes.detach().cpu().contiguous().view(torch.uint8).numpy()
    return torch.from_numpy(_halve_array(host)).view(codes.dtype).to(codes.device)


def _halve_array(codes: fp8.U8) -> fp8.U8:
    if codes.dtype != np.uint8:
        raise TypeError(f"expected uint8 codes, found {codes.dtype}")
    halved = np.empty(codes.shape, dtype=np.uint8)
    fp8.halve(np.ascontiguousarray(codes).reshape(-1), halved.reshape(-1))
    return halved


def __getattr__(name: str) -> float:
    if name == "FP8_MAX":
        return settings.fp8_max()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

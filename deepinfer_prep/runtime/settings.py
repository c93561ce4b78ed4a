"""The environment variables that serving code sets, read when they are needed and not at import."""

from __future__ import annotations

import os

from deepinfer_prep import fp8
from deepinfer_prep.errors import PrepError

HARDWARE_MAX = 240
"""Largest finite e4m3 value of Trainium2."""
CHECKPOINT_MAX = 448
"""Largest finite e4m3fn value."""


def fp8_max() -> float:
    """The magnitude that fp8 weights keep to: `DEEPINFER_NEURON_FP8_MAX`, 224 where it is unset.

    224 up to 240 mean halved weights and doubled scales; 448 means that e4m3fn is left alone, for
    debugging on a host.

    Raises:
        PrepError: the variable holds anything else; no conversion would keep to that range.
    """
    text = os.environ.get("DEEPINFER_NEURON_FP8_MAX", "").strip()
    if not text:
        return float(fp8.FP8_MAX)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if fp8.FP8_MAX <= value <= HARDWARE_MAX or value == CHECKPOINT_MAX:
        return value
    raise PrepError(
        f"DEEPINFER_NEURON_FP8_MAX is {text!r}. Set it to 224 (halved weights, the default) or to 448 "
        "(leave e4m3fn alone, for debugging on a host), or unset it."
    )


def leaves_e4m3fn() -> bool:
    """Whether `DEEPINFER_NEURON_FP8_MAX` asks to leave e4m3fn alone."""
    return fp8_max() > HARDWARE_MAX


def gemm_kernels() -> bool:
    """Whether NKI GEMM kernels may run; `DEEPINFER_NEURON_NKI_GEMM=0` turns them off."""
    return _switch("DEEPINFER_NEURON_NKI_GEMM")


def two_core_gemm() -> bool:
    """Whether the two-core GEMM kernels may run; `DEEPINFER_NEURON_BQ_2CORE=0` turns them off."""
    return _switch("DEEPINFER_NEURON_BQ_2CORE")


def hc_kernels() -> bool:
    """Whether NKI hyper-connection kernels may run; `DEEPINFER_NEURON_NKI_HC=0` turns them off."""
    return _switch("DEEPINFER_NEURON_NKI_HC")


def norm_kernels() -> bool:
    """Whether NKI norm and SwiGLU kernels may run; `DEEPINFER_NEURON_NKI_NORM=0` turns them off."""
    return _switch("DEEPINFER_NEURON_NKI_NORM")


def attention_kernels() -> bool:
    """Whether NKI attention, index and pool kernels may run; `DEEPINFER_NEURON_NKI_ATTN=0` turns them off."""
    return _switch("DEEPINFER_NEURON_NKI_ATTN")


def _switch(name: str) -> bool:
    return os.environ.get(name, "1").strip() != "0"

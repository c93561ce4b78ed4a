"""What serving code imports: loader, compiler set-up, compile backend and kernel dispatch.

    from deepinfer_prep.runtime import fp8, gemm, load_weights, mhc

Sub-modules are imported when they are first asked for, so that this package itself needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = frozenset({"fp8", "gemm", "mhc", "neuron"})
_HOMES = {
    "LoadReport": "load",
    "PreparedCheckpoint": "loading.checkpoint",
    "Request": "loading.checkpoint",
    "Slice": "loading.slices",
    "SliceError": "loading.slices",
    "StoredTensor": "loading.checkpoint",
    "Target": "load",
    "WeightParts": "loading.checkpoint",
    "configure_compiler": "compiler",
    "describe": "compiler",
    "load_weights": "load",
    "rescale_fp8_weights": "rescaling.rescale",
    "weights_iterator": "load",
}
"""Public name -> the module of this package that holds it."""

__all__ = sorted({*_MODULES, *_HOMES})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""What serving code imports: loader, compiler set-up, compile backend and kernel dispatch.

    from deepinfer_prep.runtime import deepinfer, fp8, gemm, load_weights, mhc

Sub-modules are imported when they are first asked for, so that what is not used costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "deepinfer_prep.runtime needs torch, which is not installed. Install it with `pip install "
        "'deepinfer-prep[runtime]'`; inspecting, converting and verifying do without it.",
        name="torch",
    )
if importlib.util.find_spec("deepinfer_prep.kernels") is None:
    raise ModuleNotFoundError(
        "deepinfer_prep.kernels is not there: a clone of the repository keeps it elsewhere, so run `pip install -e .` "
        "in the clone rather than putting it on the path.",
        name="deepinfer_prep.kernels",
    )

if TYPE_CHECKING:
    from deepinfer_prep.runtime import deepinfer, fp8, gemm, mhc, neuron
    from deepinfer_prep.runtime.compiler import configure_compiler, describe
    from deepinfer_prep.runtime.load import LoadReport, load_weights, weights_iterator
    from deepinfer_prep.runtime.loading.assembly import Target
    from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint, WeightParts
    from deepinfer_prep.runtime.loading.contents import StoredTensor
    from deepinfer_prep.runtime.loading.requests import Request
    from deepinfer_prep.runtime.loading.scale_form import ScaleForm
    from deepinfer_prep.runtime.loading.slices import Slice, SliceError
    from deepinfer_prep.runtime.rescaling.rescale import rescale_fp8_weights

__all__ = [
    "LoadReport",
    "PreparedCheckpoint",
    "Request",
    "ScaleForm",
    "Slice",
    "SliceError",
    "StoredTensor",
    "Target",
    "WeightParts",
    "configure_compiler",
    "deepinfer",
    "describe",
    "fp8",
    "gemm",
    "load_weights",
    "mhc",
    "neuron",
    "rescale_fp8_weights",
    "weights_iterator",
]

_MODULES = frozenset(
    {"attention", "deepinfer", "experts", "fp8", "gemm", "index", "mhc", "neuron", "norm", "pool", "regions"}
)
_HOMES = {
    "LoadReport": "load",
    "PreparedCheckpoint": "loading.checkpoint",
    "Request": "loading.requests",
    "ScaleForm": "loading.scale_form",
    "Slice": "loading.slices",
    "SliceError": "loading.slices",
    "StoredTensor": "loading.contents",
    "Target": "loading.assembly",
    "WeightParts": "loading.checkpoint",
    "configure_compiler": "compiler",
    "describe": "compiler",
    "load_weights": "load",
    "rescale_fp8_weights": "rescaling.rescale",
    "weights_iterator": "load",
}
"""Public name -> the module of this package that holds it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
    return getattr(module, name) if name in _HOMES else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

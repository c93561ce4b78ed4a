"""Prepare fp8 checkpoints for AWS Trainium2, once, offline and exactly.

    from deepinfer_prep import convert_checkpoint, inspect_checkpoint, verify_checkpoint

The functions are imported on first use, so that the command starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepinfer_prep._version import __version__

if TYPE_CHECKING:
    from deepinfer_prep.convert import ConversionResult, convert_checkpoint
    from deepinfer_prep.errors import PrepError, RefusedError
    from deepinfer_prep.inspect import Inspection, inspect_checkpoint
    from deepinfer_prep.options import Options
    from deepinfer_prep.verify import VerificationResult, verify_checkpoint
    from deepinfer_prep.workers import Progress
    from deepinfer_prep.writing.computed_output import ComputedOutput, compute_output

__all__ = [
    "ComputedOutput",
    "ConversionResult",
    "Inspection",
    "Options",
    "PrepError",
    "Progress",
    "RefusedError",
    "VerificationResult",
    "__version__",
    "compute_output",
    "convert_checkpoint",
    "inspect_checkpoint",
    "verify_checkpoint",
]

_HOMES = {
    "ComputedOutput": "writing.computed_output",
    "ConversionResult": "convert",
    "Inspection": "inspect",
    "Options": "options",
    "PrepError": "errors",
    "Progress": "workers",
    "RefusedError": "errors",
    "VerificationResult": "verify",
    "compute_output": "writing.computed_output",
    "convert_checkpoint": "convert",
    "inspect_checkpoint": "inspect",
    "verify_checkpoint": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""A strict NumPy stand-in for the part of AWS's `nki` that trn2 kernels use. See README.md."""

from .context import Options
from .errors import EmulatorError, Rule, RuleError
from .install import install, installed, real_nki, uninstall
from .jit import TensorSpec
from .lint import Finding, lint, lint_file
from .record import Instruction, Operand, count, signatures
from .runner import Run, run, to_numpy, to_torch

__all__ = [
    "EmulatorError", "Finding", "Instruction", "Operand", "Options", "Rule", "RuleError", "Run", "TensorSpec",
    "count", "install", "installed", "lint", "lint_file", "real_nki", "run", "signatures",
    "to_numpy", "to_torch", "uninstall",
]  # fmt: skip

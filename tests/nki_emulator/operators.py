"""The operators nl.* names: ALU operators of VectorE and GpSimd, activation functions of ScalarE.

Tables: aws-neuron-sdk docs, nki/api/nki.api.shared (tbl-aluop, tbl-act-func).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from . import rules
from .context import refuse
from .numeric import F32, Array


@dataclass(frozen=True)
class Op:
    """A name under nl that instructions take as `op`."""

    name: str

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        refuse(
            rules.NOT_MODELLED, f"nl.{self.name}", "", "nl functions allocate their results: use the nisa instruction"
        )

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _compare(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], F32]:
    return lambda a, b: np.asarray(function(a, b), np.float32)


def _logical(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], F32]:
    return lambda a, b: np.asarray(function(a != 0, b != 0), np.float32)


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": _compare(np.equal),
    "not_equal": _compare(np.not_equal),
    "greater_equal": _compare(np.greater_equal),
    "greater": _compare(np.greater),
    "less_equal": _compare(np.less_equal),
    "less": _compare(np.less),
    "logical_and": _logical(np.logical_and),
    "logical_or": _logical(np.logical_or),
    "logical_xor": _logical(np.logical_xor),
    "power": lambda a, b: np.asarray(np.power(np.float64(a), np.float64(b)), np.float32),
}
"""Binary arithmetic operators, on fp32 arrays."""

UNARY: dict[str, Callable[[F32], F32]] = {
    "abs": np.abs,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "reciprocal": np.reciprocal,
}
"""Unary arithmetic operators of tensor_scalar, on fp32 arrays."""


def _left_shift(a: Array, b: Array) -> Array:
    unsigned = a.view(np.dtype(f"u{a.dtype.itemsize}"))
    return _shifted(unsigned, b, np.left_shift).view(a.dtype)


def _right_shift(a: Array, b: Array) -> Array:
    """Logical: zeros come in from the left, whatever the sign."""
    unsigned = a.view(np.dtype(f"u{a.dtype.itemsize}"))
    return _shifted(unsigned, b, np.right_shift).view(a.dtype)


def _shifted(unsigned: Array, amount: Array, shift: Any) -> Array:
    return np.asarray(shift(unsigned, amount.astype(unsigned.dtype)), unsigned.dtype)


BITVEC: dict[str, Callable[[Array, Array], Array]] = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": _left_shift,
    "right_shift": _right_shift,
}
"""Binary bitvec operators, on integer arrays of one type."""

SHIFTS = ("left_shift", "right_shift")
REDUCING = ("add", "subtract", "multiply", "maximum", "minimum", "logical_and", "logical_or", "logical_xor")
BITVEC_REDUCING = ("bitwise_and", "bitwise_or", "bitwise_xor")
BITVEC_REDUCED_TYPES = ("uint8", "uint16", "uint32", "int32")
"""What the compiler takes (NCC_IBVF038, aws-neuron-sdk issue 1381)."""
LOGICAL_REDUCING = ("logical_and", "logical_or", "logical_xor")
TRN3_ONLY = ("abs_max", "abs_min", "square", "relu")
NOT_ON_DEVICE = ("divide", "mod", "fmod", "floor_divide")


def _sigmoid(x: F32) -> F32:
    return np.asarray(1.0 / (1.0 + np.exp(-x.astype(np.float64))), np.float32)


def _softplus(x: F32) -> F32:
    return np.asarray(np.logaddexp(0.0, x.astype(np.float64)), np.float32)


def _precise(function: Callable[[Any], Any]) -> Callable[[F32], F32]:
    return lambda x: np.asarray(function(x.astype(np.float64)), np.float32)


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _logistic(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _normal_cdf(x: Any) -> Any:
    return 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))


def _normal_density(x: Any) -> Any:
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _gelu(x: Any) -> Any:
    return x * _normal_cdf(x)


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


_ANY = (-math.inf, math.inf)


@dataclass(frozen=True)
class Activation:
    """A ScalarE function, computed in fp64 and rounded once, and the range of inputs it is valid for."""

    function: Callable[[F32], F32]
    low: float
    high: float
    both_signs: bool = False
    """Whether the range holds for |x| (reciprocal)."""


ACTIVATIONS: dict[str, Activation] = {
    "copy": Activation(lambda x: x, *_ANY),
    "square": Activation(np.square, *_ANY),
    "abs": Activation(np.abs, *_ANY),
    "sign": Activation(np.sign, *_ANY),
    "relu": Activation(lambda x: np.maximum(x, np.float32(0)), *_ANY),
    "sigmoid": Activation(_sigmoid, *_ANY),
    "silu": Activation(lambda x: x * _sigmoid(x), *_ANY),
    "tanh": Activation(_precise(np.tanh), *_ANY),
    "softplus": Activation(_softplus, *_ANY),
    "exp": Activation(_precise(np.exp), *_ANY),
    "erf": Activation(_precise(_erf), *_ANY),
    "erf_dx": Activation(_precise(lambda x: 2.0 / math.sqrt(math.pi) * np.exp(-x * x)), *_ANY),
    "gelu": Activation(_precise(_gelu), *_ANY),
    "gelu_dx": Activation(_precise(lambda x: _normal_cdf(x) + x * _normal_density(x)), *_ANY),
    "gelu_apprx_tanh": Activation(_precise(_gelu_tanh), *_ANY),
    "gelu_apprx_sigmoid": Activation(_precise(lambda x: x / (1.0 + np.exp(-1.702 * x))), *_ANY),
    "gelu_apprx_sigmoid_dx": Activation(
        _precise(lambda x: _logistic(1.702 * x) * (1.0 + 1.702 * x * _logistic(-1.702 * x))), *_ANY
    ),
    "mish": Activation(_precise(lambda x: x * np.tanh(np.logaddexp(0.0, x))), *_ANY),
    "relu_dx": Activation(lambda x: (x > 0).astype(np.float32), *_ANY),
    "tanh_dx": Activation(_precise(lambda x: 1.0 - np.square(np.tanh(x))), *_ANY),
    "silu_dx": Activation(_precise(lambda x: _logistic(x) * (1.0 + x * (1.0 - _logistic(x)))), *_ANY),
    "log": Activation(_precise(np.log), 2.0**-64, 2.0**64),
    "sin": Activation(_precise(np.sin), -math.pi, math.pi),
    "arctan": Activation(_precise(np.arctan), -math.pi / 2, math.pi / 2),
    "sqrt": Activation(_precise(np.sqrt), 2.0**-116, 2.0**118),
    "rsqrt": Activation(_precise(lambda x: 1.0 / np.sqrt(x)), 2.0**-87, 2.0**97),
    "reciprocal": Activation(_precise(lambda x: 1.0 / x), 2.0**-42, 2.0**42, both_signs=True),
}

NAMES = sorted({*ARITHMETIC, *UNARY, *BITVEC, *ACTIVATIONS, *TRN3_ONLY, *NOT_ON_DEVICE, "invert"})
OPS: dict[str, Op] = {name: Op(name) for name in NAMES} | {"max": Op("maximum"), "min": Op("minimum")}


def op_name(op: str, role: str, value: Any) -> str:
    """The name of an operator operand; refuses what no trn2 engine has."""
    if not isinstance(value, Op):
        refuse(rules.OPERAND_KIND, op, role, f"{value!r} is not an nl operator")
    if value.name in NOT_ON_DEVICE:
        refuse(rules.NO_DIVIDE, op, role, repr(value))
    return value.name


def alu_name(op: str, role: str, value: Any) -> str:
    """The name of an ALU operator."""
    name = op_name(op, role, value)
    if name in TRN3_ONLY:
        refuse(rules.TRN2_ONLY, op, role, f"nl.{name} as an ALU operator")
    if name not in ARITHMETIC and name not in UNARY and name not in BITVEC and name != "invert":
        refuse(rules.OP_CLASS, op, role, f"nl.{name} is no ALU operator")
    return name


def is_bitvec(name: str) -> bool:
    return name in BITVEC or name == "invert"

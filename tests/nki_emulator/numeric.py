"""Conversions between stored elements and the fp32 in which every engine computes.

Aws-neuron-sdk docs: nki/api/nki.isa.tensor_tensor and siblings (fp32 arithmetic, cast on write);
release-notes/components/nki 0.6.0 (fp32 to integer: round to nearest even and saturate).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from . import hardware, rules
from .context import Options, refuse
from .dtypes import ALL, DType
from .tensor import Tensor

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

_SMALLEST_NORMAL = np.float32(2.0**-126)
_FP8_VALUES = {
    d.name: np.arange(256, dtype=np.uint8).view(d.numpy).astype(np.float32) for d in ALL if d.is_fp8
}  # a table look-up is faster than a cast and decodes the same 256 codes


def flush(values: F32, options: Options) -> F32:
    """Subnormals become zeros of their sign, if the run asks for it."""
    if not options.flush_subnormals:
        return values
    tiny = np.abs(values) < _SMALLEST_NORMAL
    if not tiny.any():
        return values
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def read_f32(tensor: Tensor, options: Options, op: str, role: str) -> F32:
    """The elements as fp32, exactly. Raises for integers that fp32 would round."""
    array, dtype = tensor.array(), tensor.dtype
    if dtype.is_fp8:
        return _FP8_VALUES[dtype.name][array.view(np.uint8)]
    if dtype.is_int:
        if dtype.itemsize == 4:
            _check_exact(array, op, role)
        return array.astype(np.float32)
    return flush(array.astype(np.float32, copy=False), options)


def _check_exact(array: Array, op: str, role: str) -> None:
    low, high = int(array.min()), int(array.max())
    if max(-low, high) <= hardware.MAX_EXACT_INT:
        return
    inexact = array[array.astype(np.float64) != array.astype(np.float32)]
    if inexact.size:
        refuse(rules.VALUE_INT, op, role, f"{int(inexact.flat[0])} is not an fp32 value")


def to_dtype(values: F32, dtype: DType, options: Options, op: str, role: str) -> Array:
    """fp32 results as an engine writes them: to nearest even; integers saturate, fp8 must not overflow."""
    values = flush(values, options)
    if dtype.is_int:
        return _to_int(values, dtype, op, role)
    result: Array = values.astype(dtype.numpy, copy=False)
    if dtype.is_fp8:
        _check_fp8(values, result, dtype, op, role)
    return result


def _to_int(values: F32, dtype: DType, op: str, role: str) -> Array:
    if np.isnan(values).any():
        refuse(rules.NAN_TO_INT, op, role, f"NaN written to {dtype}")
    limits = np.iinfo(dtype.numpy)
    wide = np.rint(values.astype(np.float64))
    return np.clip(wide, limits.min, limits.max).astype(dtype.numpy)


def _check_fp8(values: F32, result: Array, dtype: DType, op: str, role: str) -> None:
    exponent = 0x78 if dtype.name == "float8_e4m3" else 0x7C
    special = (result.view(np.uint8) & exponent) == exponent
    if special.any():
        refuse(rules.FP8_OVERFLOW, op, role, f"{values[special].flat[0]!r} written to {dtype}")


SLICE_BITS = 22
"""Bits of a slice in `exact_dot`: 256 products of two slices sum to less than 2^53, the integers of a float64."""


def exact_dot(left: F32, right: F32) -> F32:
    """left[k, m].T @ right[k, n], each element correct to float64 precision and then rounded once to fp32.

    An element depends on its own column of `left` and of `right` alone: not on m, n, nor on the order in which the
    machine's BLAS sums. Columns are cut into slices of SLICE_BITS bits below their largest element, as integers: every
    partial sum of products of two slices is then an exact float64, in any order. k is at most 256.

    Pseudocode:
        dot = sum of slice_i(left).T @ slice_j(right) over i, j in a fixed order, in float64
    """
    total = np.zeros((left.shape[1], right.shape[1]))
    (a, a_exponents), (b, b_exponents) = _scaled(left), _scaled(right)
    lower = list(_slices(b))
    for i, upper in enumerate(_slices(a)):
        for j, other in enumerate(lower):
            total += np.ldexp(upper.T @ other, -SLICE_BITS * (i + j + 2))
    total = np.ldexp(total, a_exponents[:, None] + b_exponents[None, :])
    special = np.logical_or.outer(~np.isfinite(left).all(axis=0), ~np.isfinite(right).all(axis=0))
    if special.any():
        total[special] = (left.astype(np.float64).T @ right.astype(np.float64))[special]  # inf or NaN in any order
        total[np.isnan(total)] = np.nan
    rounded: F32 = (total + 0.0).astype(np.float32)
    return rounded


def _scaled(values: F32) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intc]]:
    """Each column divided by the power of two that brings its largest element below 1, and the exponents of those."""
    wide = np.where(np.isfinite(values), values, 0.0).astype(np.float64)
    exponents = np.frexp(np.abs(wide).max(axis=0))[1]
    return np.ldexp(wide, -exponents), exponents


def _slices(values: npt.NDArray[np.float64]) -> Iterator[npt.NDArray[np.float64]]:
    """Integers of SLICE_BITS bits whose sum, slice i times 2^(-SLICE_BITS (i + 1)), is `values` (below 1) exactly."""
    rest = np.ldexp(values, SLICE_BITS)
    while rest.any():
        whole = np.rint(rest)
        yield whole
        rest = np.ldexp(rest - whole, SLICE_BITS)


def tree_reduce(function: np.ufunc, values: F32) -> F32:
    """The reduction of the last axis, as a tree of pairs: an order that depends on that axis' length alone."""
    while values.shape[-1] > 1:
        half, odd = divmod(values.shape[-1], 2)
        pairs = function(values[..., :half], values[..., half : 2 * half])
        values = np.concatenate((pairs, values[..., -1:]), axis=-1) if odd else pairs
    return values[..., 0]


def constant_f32(value: Any, op: str, role: str) -> np.float32:
    """A compile-time constant of an arithmetic operator."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(rules.CONSTANT, op, role, f"{value!r} of type {type(value).__name__}")
    if isinstance(value, int) and abs(value) > hardware.MAX_EXACT_INT:
        refuse(rules.VALUE_INT, op, role, f"the constant {value}")
    with np.errstate(over="ignore"):
        converted: np.float32 = np.float32(value)
    if np.isinf(converted) and value not in (float("inf"), float("-inf")):
        refuse(rules.CONSTANT, op, role, f"{value!r} overflows fp32")
    return converted


def constant_int(value: Any, dtype: DType, op: str, role: str) -> Array:
    """A compile-time constant of a bitvec operator: an int that the tile's type holds."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(rules.BITVEC, op, role, f"{type(value).__name__}: only integer constants are documented")
    limits = np.iinfo(dtype.numpy)
    high = min(int(limits.max), hardware.INT32_MAX)
    if not int(limits.min) <= value <= high:
        refuse(rules.CONSTANT, op, role, f"{value} does not fit {dtype} (or a 32-bit signed int)")
    return np.asarray(value, dtype.numpy)

"""The element types of trn2 and what NumPy calls them.

float8_e4m3 is the hardware's IEEE-like type (bias 7, largest finite 240, exponent field 15 is inf or NaN), not OCP's
e4m3fn (aws-neuron-sdk docs: nki/api/nki.api.shared, nki/guides/architecture/trainium2_arch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type. Compares by value, as `tensor.dtype == nl.bfloat16` in a kernel expects."""

    name: str
    kind: str
    """"float", "int" or "refused" (a type of another generation, or one that the emulator does not model)."""
    numpy: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.numpy.itemsize)

    @property
    def is_int(self) -> bool:
        return self.kind == "int"

    @property
    def is_fp8(self) -> bool:
        return self.kind == "float" and self.itemsize == 1

    def __repr__(self) -> str:
        return self.name


def _dtype(name: str, kind: str, numpy_type: Any) -> DType:
    return DType(name, kind, np.dtype(numpy_type))


bool_ = _dtype("bool_", "int", np.uint8)
int8 = _dtype("int8", "int", np.int8)
int16 = _dtype("int16", "int", np.int16)
int32 = _dtype("int32", "int", np.int32)
uint8 = _dtype("uint8", "int", np.uint8)
uint16 = _dtype("uint16", "int", np.uint16)
uint32 = _dtype("uint32", "int", np.uint32)
float16 = _dtype("float16", "float", np.float16)
bfloat16 = _dtype("bfloat16", "float", ml_dtypes.bfloat16)
float32 = _dtype("float32", "float", np.float32)
float8_e4m3 = _dtype("float8_e4m3", "float", ml_dtypes.float8_e4m3)
float8_e5m2 = _dtype("float8_e5m2", "float", ml_dtypes.float8_e5m2)

tfloat32 = _dtype("tfloat32", "refused", np.float32)
float8_e4m3fn = _dtype("float8_e4m3fn", "refused", np.uint8)
float8_e8m0fnu = _dtype("float8_e8m0fnu", "refused", np.uint8)
float8_e5m2_x4 = _dtype("float8_e5m2_x4", "refused", np.uint32)
float8_e4m3fn_x4 = _dtype("float8_e4m3fn_x4", "refused", np.uint32)
float4_e2m1fn_x4 = _dtype("float4_e2m1fn_x4", "refused", np.uint16)

ALL: tuple[DType, ...] = (
    bool_, int8, int16, int32, uint8, uint16, uint32, float16, bfloat16, float32, float8_e4m3, float8_e5m2,
    tfloat32, float8_e4m3fn, float8_e8m0fnu, float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4,
)  # fmt: skip

_FROM_NUMPY = {d.numpy: d for d in ALL if d.kind != "refused" and d.name != "bool_"}


def from_numpy(numpy_type: np.dtype[Any]) -> DType | None:
    """The element type a kernel sees for an array of `numpy_type`; None if it has none on trn2."""
    if numpy_type == np.dtype(np.bool_):
        return bool_
    return _FROM_NUMPY.get(numpy_type)

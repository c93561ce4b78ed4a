"""What a quantized weight is: its element, its block and its scale; and the one table of tensor dtypes."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Element = Literal["e4m3", "e2m1"]
"""How a quantized weight's values are coded: one e4m3 value a byte, or two e2m1 (fp4) values a byte."""

KERNEL_BLOCK = 32
"""Rows and columns of the blocks whose scale is one byte of a kernel scale; the GEMM kernels know no other."""

FP8_DTYPE = "F8_E4M3"
"""What safetensors calls e4m3fn."""


class DtypeKind(enum.Enum):
    """What the elements of a dtype are."""

    INTEGER = "integer"
    FLOAT = "float"
    """A number that NumPy or a widening to float32 can compute with; a scale in it is read as a number."""
    EXPONENT = "exponent"
    """e8m0: the value 2^(byte - 127)."""
    NARROW = "narrow"
    """Eight bits or fewer, with sign, exponent and mantissa."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """Bits and kind of one element."""

    bits: int
    kind: DtypeKind


_INTEGER, _FLOAT, _NARROW = DtypeKind.INTEGER, DtypeKind.FLOAT, DtypeKind.NARROW

DTYPES: Mapping[str, Dtype] = {
    "BOOL": Dtype(8, _INTEGER),
    "U8": Dtype(8, _INTEGER),
    "I8": Dtype(8, _INTEGER),
    "U16": Dtype(16, _INTEGER),
    "I16": Dtype(16, _INTEGER),
    "U32": Dtype(32, _INTEGER),
    "I32": Dtype(32, _INTEGER),
    "U64": Dtype(64, _INTEGER),
    "I64": Dtype(64, _INTEGER),
    "F16": Dtype(16, _FLOAT),
    "BF16": Dtype(16, _FLOAT),
    "F32": Dtype(32, _FLOAT),
    "F64": Dtype(64, _FLOAT),
    "C64": Dtype(64, _INTEGER),
    "F8_E4M3": Dtype(8, _NARROW),
    "F8_E5M2": Dtype(8, _NARROW),
    "F8_E8M0": Dtype(8, DtypeKind.EXPONENT),
    "F8_E4M3FNUZ": Dtype(8, _NARROW),
    "F8_E5M2FNUZ": Dtype(8, _NARROW),
    "F6_E2M3": Dtype(6, _NARROW),
    "F6_E3M2": Dtype(6, _NARROW),
    "F4": Dtype(4, _NARROW),
}
"""Every dtype of safetensors 0.8."""

FLOAT_DTYPES = frozenset(name for name, dtype in DTYPES.items() if dtype.kind is DtypeKind.FLOAT)
EXPONENT_DTYPES = frozenset({"F8_E8M0", "U8"})
"""Dtypes that e8m0 scales are stored in; U8 is one only where the format or the config says so."""


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size in bytes of a tensor whose elements fill whole bytes."""
    return math.prod(shape) * DTYPES[dtype].bits // 8


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype of whole bytes; 1 for those that pack several elements into a byte."""
    return max(1, DTYPES[dtype].bits // 8)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight with the scale that multiplies it.

    `block` is how many rows and logical columns one scale value covers; None where neither the format nor
    the config says it, or where they disagree, with the sentence in `block_problem`. `no_kernel_scale` is
    the family's own reason why no kernel takes this weight; empty for a GEMM weight.
    """

    weight: str
    scale: str
    element: Element
    block: tuple[int, int] | None
    block_problem: str = ""
    no_kernel_scale: str = ""


def matrix_shape(shape: tuple[int, ...], element: Element) -> tuple[int, int]:
    """Rows and logical columns of a weight's last two axes; an e2m1 byte holds two columns."""
    rows, columns = shape[-2:]
    return rows, columns * 2 if element == "e2m1" else columns


def grid_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """How many scale values a matrix has: one for each block, edge blocks included."""
    return math.ceil(rows / block[0]), math.ceil(columns / block[1])

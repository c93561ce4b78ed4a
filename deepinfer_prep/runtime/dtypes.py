"""The torch dtype of every safetensors dtype, and which dtypes hold the same bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepinfer_prep.quantized import FLOAT_DTYPES

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
}
"""Every dtype of safetensors 0.8 but F6_E2M3 and F6_E3M2, which torch does not have."""

FLOAT_NAMES: Mapping[torch.dtype, str] = {TORCH_DTYPES[name]: name for name in sorted(FLOAT_DTYPES)}
"""Dtypes whose elements are numbers, by the name that the byte arithmetic knows them by."""

_SAME_BYTES = (
    frozenset({torch.float8_e4m3fn, torch.uint8}),
    frozenset({torch.float8_e8m0fnu, torch.uint8}),
    frozenset({torch.int8, torch.uint8, torch.float4_e2m1fn_x2}),
)


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in torch: an F4 element is half a byte, and torch counts pairs along the last axis."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" and shape else shape


def holds_same_bytes(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a tensor of one dtype may be filled with the bytes of the other: codes under another name."""
    return stored == wanted or any({stored, wanted} <= group for group in _SAME_BYTES)

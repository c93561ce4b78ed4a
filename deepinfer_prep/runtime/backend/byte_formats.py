"""The 8-bit float types: which are carried as bytes, which pass, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_prep.runtime.backend import codec_operations

CARRIER = torch.uint8


@dataclass(frozen=True)
class ByteFormat:
    """A type that rides as uint8, with its two conversions.

    decode: (codes, dtype) -> values of that dtype. encode: (values) -> codes.
    """

    name: str
    dtype: torch.dtype
    decode: Callable[[Tensor, torch.dtype], Tensor]
    encode: Callable[[Tensor], Tensor]


E4M3FN = ByteFormat("e4m3fn", torch.float8_e4m3fn, codec_operations.decode_e4m3fn, codec_operations.encode_e4m3fn)
E8M0 = ByteFormat("e8m0", torch.float8_e8m0fnu, codec_operations.decode_e8m0, codec_operations.encode_e8m0)

CARRIED: dict[torch.dtype, ByteFormat] = {E4M3FN.dtype: E4M3FN, E8M0.dtype: E8M0}

REFUSED: dict[torch.dtype, str] = {
    torch.float8_e4m3fnuz: "no Trainium reads fnuz types (NCC_EVRF005); convert to float8_e4m3fn",
    torch.float8_e5m2fnuz: "no Trainium reads fnuz types (NCC_EVRF005); convert to float8_e5m2",
    torch.float4_e2m1fn_x2: "packed fp4 has no arithmetic on Trainium2; pass it as .view(torch.uint8)",
}
"""Types that the hardware has no reading for. float8_e5m2, which it has, passes untouched."""


def carried(value: object) -> ByteFormat | None:
    """The byte format of a dtype, or of a tensor's dtype; None for everything else."""
    dtype = value.dtype if isinstance(value, Tensor) else value
    return CARRIED.get(dtype) if isinstance(dtype, torch.dtype) else None

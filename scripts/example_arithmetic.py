"""Two ways to compute the example's layers: as on a device, or in fp32 without rounding activations and caches."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deepinfer_prep.kernels import cache_records, constants, reference
from deepinfer_prep.runtime import gemm


class Arithmetic(Protocol):
    """What differs between the two ways."""

    dtype: torch.dtype
    """Of activations and caches."""

    def linear(self, x: Tensor, weight: Tensor, expert: int | None = None) -> Tensor:
        """x [t, k] times a prepared weight [n, k], or one of [experts, n, k], -> [t, n]."""

    def grouped(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        """Each group of a prepared weight's rows [groups * n, k] times its own part of x [t, groups * k]."""

    def gated(self, x: Tensor, weight: Tensor, expert: int, flag: Tensor) -> Tensor:
        """`linear` where flag int32 [1, 1] is 1, else zeros."""

    def window(self, x: Tensor) -> Tensor:
        """What a window cache keeps of keys [t, d]."""

    def entry(self, x: Tensor) -> Tensor:
        """What a compressed cache keeps of entries [t, d]."""

    def index(self, x: Tensor) -> Tensor:
        """What index queries and keys [..., d] are rounded to."""


class Served:
    """bf16 activations through fp8 before they meet weights, caches of quantized values: the package's runtime."""

    dtype = torch.bfloat16

    def linear(self, x: Tensor, weight: Tensor, expert: int | None = None) -> Tensor:
        return gemm.linear_qdq(x, weight, expert)

    def grouped(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        codes, scales = (part.chunk(groups) for part in _stored(weight))
        parts = zip(x.chunk(groups, dim=-1), codes, scales, strict=True)
        return torch.cat([gemm.linear_qdq_raw(*one) for one in parts], dim=-1)

    def gated(self, x: Tensor, weight: Tensor, expert: int, flag: Tensor) -> Tensor:
        # The kernel reads no weights where the flag is 0, so that a step costs the chosen experts only.
        found = gemm.linear_qdq_gated(x, weight, expert, flag)
        return gemm.linear_qdq(x, weight, expert) * flag.to(x.dtype) if found is None else found

    def window(self, x: Tensor) -> Tensor:
        kept: Tensor = cache_records.decode_e4m3(*cache_records.encode_e4m3(x, constants.FP8_MAX))
        return kept.to(self.dtype)

    def entry(self, x: Tensor) -> Tensor:
        kept: Tensor = cache_records.decode_e2m1_e4m3(*cache_records.encode_e2m1_e4m3(x))
        return kept.to(self.dtype)

    def index(self, x: Tensor) -> Tensor:
        kept: Tensor = cache_records.decode_e2m1_blocks(*cache_records.encode_e2m1(x))
        return kept.to(self.dtype)


class Wide:
    """fp32 throughout, with the same weights, each of which is dequantized once."""

    dtype = torch.float32

    def __init__(self) -> None:
        self._values: dict[tuple[int, int | None], Tensor] = {}

    def linear(self, x: Tensor, weight: Tensor, expert: int | None = None) -> Tensor:
        return x @ self._dequantized(weight, expert, x.shape[-1]).T

    def grouped(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        values = self._dequantized(weight, None, x.shape[-1] // groups).chunk(groups)
        return torch.cat([one @ part.T for one, part in zip(x.chunk(groups, dim=-1), values, strict=True)], dim=-1)

    def gated(self, x: Tensor, weight: Tensor, expert: int, flag: Tensor) -> Tensor:
        return self.linear(x, weight, expert) * flag

    def window(self, x: Tensor) -> Tensor:
        return x

    def entry(self, x: Tensor) -> Tensor:
        return x

    def index(self, x: Tensor) -> Tensor:
        return x

    def _dequantized(self, weight: Tensor, expert: int | None, k: int) -> Tensor:
        key = weight.data_ptr(), expert
        if key not in self._values:
            codes, scales = _stored(weight)
            whole = (codes, scales) if expert is None else (codes[expert], scales[expert])
            self._values[key] = _dequantized(*whole, k)
        return self._values[key]


SERVED = Served()


def _stored(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A prepared weight's bytes and block scales."""
    return weight._nki_weight, weight._nki_scale  # type: ignore[attr-defined]


def _dequantized(codes: Tensor, scales: Tensor, k: int) -> Tensor:
    """A weight's values, fp32 [n, k]. The last block of a row may be narrower than its scale says."""
    packed = codes.shape[-1] != k
    padding = scales.shape[-1] * constants.FP8_BLOCK - k
    codes = torch.nn.functional.pad(codes, (0, padding // 2 if packed else padding))
    values: Tensor = (reference.dequantize_fp4 if packed else reference.dequantize_fp8)(codes, scales)
    return values[:, :k]

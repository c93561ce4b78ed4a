"""Torch references for the kernels: the oracle of their tests and the CPU path of the runtime.

Every function named after a kernel takes the kernel's arguments and returns what the kernel returns,
computed in fp32 and rounded once to bf16 where the kernel's result is bf16. The functions are plain and
free of data-dependent control flow, so torch.compile traces them whole. The `dequantize_*` functions
take the dtype to compute in; in float64 they are exact and serve as oracles.

Weights are read as the hardware reads them: e4m3 with bias 7 whose exponent field 15 means inf or NaN
(a prepared checkpoint holds no such code). Scale bytes are e8m0 (OCP Microscaling 1.0): byte b is
2^(b - 127).
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from .constants import (
    AMAX_FLOOR,
    BAND_ROWS,
    FP8_BLOCK,
    FP8_MAX,
    HC,
    HC_EPS,
    MANTISSA_BITS,
    NORM_EPS,
    SINKHORN_ITERS,
    TWO_CORE_N_MULTIPLE,
)

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def _hardware_e4m3() -> Tensor:
    """The value of each of the 256 codes of trn2's float8_e4m3, in float64."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for sign in (0x00, 0x80):
        values[sign | 0x78] = -torch.inf if sign else torch.inf
        values[sign | 0x79 : (sign | 0x7F) + 1] = torch.nan
    return values


_E4M3_VALUES = _hardware_e4m3()


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of uint8 codes as trn2's float8_e4m3 reads them: 0x78 is inf, 0x79 to 0x7F are NaN."""
    return _E4M3_VALUES.to(codes.device, dtype)[codes.int()]


def decode_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of packed e2m1 codes: uint8 [..., k/2] -> [..., k], the low nibble being the even element."""
    magnitude = torch.tensor(_E2M1_VALUES, dtype=dtype, device=packed.device)
    table = torch.cat([magnitude, -magnitude])
    codes = torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)
    return table[codes.int()]


def decode_e8m0(scale: Tensor) -> Tensor:
    """fp32 values of e8m0 bytes as the kernels read them: byte 0 is 0.0, byte 255 is inf.

    Byte 0 stands for 2^-127, a subnormal fp32 number that an engine may flush, so the kernels fix it to zero.
    """
    return (scale.to(torch.int32) << MANTISSA_BITS).view(torch.float32)


def decode_e8m0_exact(scale: Tensor) -> Tensor:
    """float64 values of e8m0 bytes by the OCP definition: byte 0 is 2^-127, byte 255 is NaN."""
    value = torch.exp2(scale.to(torch.float64) - _EXPONENT_BIAS)
    return torch.where(scale == 255, torch.nan, value)


def _scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return decode_e8m0_exact(scale) if dtype == torch.float64 else decode_e8m0(scale).to(dtype)


def _apply_blocks(value: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """value [n, k] times scale [ceil(n/rows), k/columns], one factor for each block of rows x columns."""
    by_row = scale.repeat_interleave(rows, dim=0)[: value.shape[0]]
    return (value.reshape(*by_row.shape, columns) * by_row.unsqueeze(-1)).flatten(1)


def dequantize_fp8(w: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w uint8 [n, k] (e4m3), scale uint8 [ceil(n/32), k/32] -> [n, k]."""
    return _apply_blocks(decode_e4m3(w, dtype), _scale_values(scale, dtype), 32, 32)


def dequantize_fp4(w: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w uint8 [n, k/2] (two e2m1 codes a byte), scale uint8 [n, k/32] -> [n, k]."""
    return _apply_blocks(decode_e2m1(w, dtype), _scale_values(scale, dtype), 1, 32)


def dequantize_block128(w: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """w uint8 [n, k] (e4m3), scale fp32 [ceil(n/128), k/128] -> [n, k]."""
    return _apply_blocks(decode_e4m3(w, dtype), scale.to(dtype), 128, 128)


def fp8_round_trip(x: Tensor) -> Tensor:
    """x to e4m3 and back in blocks of 32 columns with power-of-two scales: bf16 [..., k] -> bf16 [..., k].

    The scale of a block is the smallest power of two s with max(|x|, AMAX_FLOOR) / s <= 224; codes are
    rounded to nearest even. Every result has at most four significant bits, so bf16 holds it exactly.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, FP8_BLOCK)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=AMAX_FLOOR)
    bits = (amax * (1.0 / FP8_MAX)).view(torch.int32)
    mantissa = bits & ((1 << MANTISSA_BITS) - 1)
    exponent = (bits >> MANTISSA_BITS) + (mantissa != 0).to(torch.int32)
    scale = (exponent << MANTISSA_BITS).view(torch.float32)
    inverse = ((2 * _EXPONENT_BIAS - exponent) << MANTISSA_BITS).view(torch.float32)
    codes = (blocks * inverse).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(torch.bfloat16)


def stored_order(w: Tensor, codes_per_byte: int) -> Tensor:
    """A weight in the kernel layout (deepinfer_prep.kernel_layout), uint8 [n, row bytes], in its stored order."""
    n, row_bytes = w.shape
    part = n // 2 if n % TWO_CORE_N_MULTIPLE == 0 else n
    bands = [
        w[first : min(first + BAND_ROWS, start + part)]
        for start in range(0, n, part)
        for first in range(start, start + part, BAND_ROWS)
    ]
    stored = torch.cat([band.reshape(row_bytes, band.shape[0]).T for band in bands])
    if codes_per_byte == 2:
        return stored & 0x87 | stored >> 3 & 0x08 | stored << 1 & 0x70
    return stored


def fp8_linear_raw(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """x bf16 [m, k] times dequantize_fp8(w, scale) transposed: bf16 [m, n]."""
    return linear(x.float(), dequantize_fp8(w, scale)).to(torch.bfloat16)


def fp8_linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`fp8_linear_raw` of x after the fp8 round trip: bf16 [m, n]."""
    return fp8_linear_raw(fp8_round_trip(x), w, scale)


def fp4_linear_raw(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """x bf16 [m, k] times dequantize_fp4(w, scale) transposed: bf16 [m, n]."""
    return linear(x.float(), dequantize_fp4(w, scale)).to(torch.bfloat16)


def fp4_linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`fp4_linear_raw` of x after the fp8 round trip: bf16 [m, n]."""
    return fp4_linear_raw(fp8_round_trip(x), w, scale)


def fp4_linear_2core_gated(x: Tensor, w: Tensor, scale: Tensor, flag: Tensor) -> Tensor:
    """`fp4_linear` where flag (int32 [1, 1]) is 1, otherwise zeros: bf16 [m, n]."""
    return torch.where(flag == 1, fp4_linear(x, w, scale), 0.0)


def fp8_linear_block128(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """x bf16 [m, k] times dequantize_block128(w, scale) transposed: bf16 [m, n]."""
    return linear(x.float(), dequantize_block128(w, scale)).to(torch.bfloat16)


def hc_expand(hidden: Tensor) -> Tensor:
    """hidden bf16 [t, h] -> bf16 [t, 4, h], four equal streams."""
    return hidden.unsqueeze(-2).expand(*hidden.shape[:-1], HC, hidden.shape[-1]).contiguous()


def hc_collapse(x: Tensor, mix: Tensor) -> Tensor:
    """x bf16 [t, 4, h], mix fp32 [t, 4] -> bf16 [t, h]: the sum over streams of mix times x, in the type of x."""
    weighted = x.float() * mix.float().unsqueeze(-1)
    return weighted.sum(dim=-2).to(x.dtype)


def hc_attn_out(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """out[t, j] = post[t, j] * x[t] + sum over i of comb[t, i, j] * residual[t, i].

    x bf16 [t, h], residual bf16 [t, 4, h], post fp32 [t, 4], comb fp32 [t, 4, 4] -> bf16 [t, 4, h], in residual's type.
    """
    fresh = post.float().unsqueeze(-1) * x.float().unsqueeze(-2)
    kept = comb.float().transpose(-1, -2) @ residual.float()
    return (fresh + kept).to(residual.dtype)


def sinkhorn(logits: Tensor) -> Tensor:
    """Doubly stochastic matrices of logits [..., 4, 4]: softmax over the last axis, then 20 normalisations."""
    comb = torch.softmax(logits, dim=-1) + HC_EPS
    comb = comb / (comb.sum(dim=-2, keepdim=True) + HC_EPS)
    for _ in range(SINKHORN_ITERS - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + HC_EPS)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + HC_EPS)
    return comb


def mixes(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Stream weights of residual [t, 4, h] computed in `dtype`: pre [t, 4], post [t, 4], comb [t, 4, 4].

    fn [24, 4 * h] projects the flattened streams to 4 pre, 4 post and 16 comb logits, which are divided
    by the root mean square of the whole row; scale [3] and base [24] adjust them.
    """
    flat = residual.flatten(-2).to(dtype)
    inverse_rms = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + NORM_EPS)
    raw = linear(flat, fn.to(dtype)) * inverse_rms
    factor = scale.to(dtype).repeat_interleave(torch.tensor([HC, HC, HC * HC], device=scale.device), output_size=24)
    logits = raw * factor + base.to(dtype)
    pre = torch.sigmoid(logits[..., :HC]) + HC_EPS
    post = 2.0 * torch.sigmoid(logits[..., HC : 2 * HC])
    comb = sinkhorn(logits[..., 2 * HC :].reshape(*logits.shape[:-1], HC, HC))
    return pre, post, comb


def hc_mixes(
    residual: Tensor, fn_hi: Tensor, fn_lo: Tensor, scale: Tensor, base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Stream weights in fp32: residual bf16 [t, 4, h], fn_hi and fn_lo bf16 [24, 4 * h], scale fp32 [3],
    base fp32 [24] -> pre [t, 4], post [t, 4], comb [t, 4, 4].

    fn_hi + fn_lo, the two halves that the converter stores, is exact in fp32.
    """
    return mixes(residual, fn_hi.float() + fn_lo.float(), scale, base)


def fp8_linear_raw_kmajor(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`fp8_linear_raw` of a weight in the kernel layout: bf16 [m, n]."""
    return fp8_linear_raw(x, stored_order(w, 1), scale)


def fp8_linear_kmajor(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`fp8_linear` of a weight in the kernel layout: bf16 [m, n]."""
    return fp8_linear(x, stored_order(w, 1), scale)


def fp8_linear_block128_kmajor(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`fp8_linear_block128` of a weight in the kernel layout: bf16 [m, n]."""
    return fp8_linear_block128(x, stored_order(w, 1), scale)


def fp4_linear_raw_kmajor(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`fp4_linear_raw` of a weight in the kernel layout: bf16 [m, n]."""
    return fp4_linear_raw(x, stored_order(w, 2), scale)


def fp4_linear_kmajor(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`fp4_linear` of a weight in the kernel layout: bf16 [m, n]."""
    return fp4_linear(x, stored_order(w, 2), scale)


def fp4_linear_kmajor_2core_gated(x: Tensor, w: Tensor, scale: Tensor, flag: Tensor) -> Tensor:
    """`fp4_linear_kmajor` where flag (int32 [1, 1]) is 1, otherwise zeros: bf16 [m, n]."""
    return fp4_linear_2core_gated(x, stored_order(w, 2), scale, flag)

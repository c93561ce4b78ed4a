"""Records of DeepSeek-V4.1's caches: how keys are quantized and packed into bytes, in torch.

| record | bytes | contents |
|---|---|---|
| window | 528 a token | 512 e4m3 codes, then 16 e8m0 scales of 32 values each |
| compressed | 288 a token | 256 bytes of e2m1 pairs, low nibble first, then 32 e4m3 scales of 16 values each |
| index | 68 an entry | a page's e2m1 pairs (64 bytes an entry), then its e8m0 scales (4 an entry, of 32 values each) |

Scales follow the largest magnitude of a block, codes are rounded to nearest even and saturate. Every decoded value has
at most six significant bits, so bf16 holds it. Formats: OCP 8-bit Floating Point and OCP Microscaling 1.0.

A window record may keep to 448, e4m3fn's largest finite value, or to 224, which Trainium2's e4m3 can read as well: then
a scale is twice as large and values lose half a step in the 16 lowest codes, nothing else.
"""

import torch
from torch import Tensor

from .constants import AMAX_FLOOR, MANTISSA_BITS
from .reference import decode_e2m1

E4M3FN_MAX = 448.0
E2M1_MAX = 6.0
DEVICE_SCALE_MAX = 240.0
"""Largest e4m3 scale that Trainium2 reads as a number."""

WINDOW_BYTES = 528
COMPRESSED_BYTES = 288
INDEX_BYTES = 68

_HEAD_DIM = 512
_INDEX_DIM = 128
_E8M0_BLOCK = 32
_E4M3_BLOCK = 16
_BIAS = 127
_E4M3FN_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def encode_e4m3(x: Tensor, largest: float = E4M3FN_MAX) -> tuple[Tensor, Tensor]:
    """x [..., d] in blocks of 32: codes uint8 [..., d] (e4m3fn) and scales uint8 [..., d / 32] (e8m0).

    `largest`, 448 or 224, is the magnitude that codes keep to. Block maxima below 1e-4 count as 1e-4.
    """
    blocks = _blocks(x.float(), _E8M0_BLOCK)
    exponent = _scale_exponent(_block_maximum(blocks, AMAX_FLOOR), largest)
    codes = (blocks * _power(2 * _BIAS - exponent)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(-2), exponent.squeeze(-1).to(torch.uint8)


def decode_e4m3(codes: Tensor, scales: Tensor) -> Tensor:
    """What encode_e4m3 encoded: fp32 [..., d]."""
    values = _blocks(_E4M3FN_VALUES.to(codes.device)[codes.int()], _E8M0_BLOCK)
    return (values * _power(scales.int()).unsqueeze(-1)).flatten(-2)


def encode_e2m1(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] in blocks of 32: pairs uint8 [..., d / 2] (e2m1) and scales uint8 [..., d / 32] (e8m0).

    Block maxima below 6 * 2^-126 count as that.
    """
    blocks = _blocks(x.float(), _E8M0_BLOCK)
    exponent = _scale_exponent(_block_maximum(blocks, E2M1_MAX * 2.0**-126), E2M1_MAX)
    nibbles = e2m1_codes(blocks * _power(2 * _BIAS - exponent))
    return _pairs(nibbles.flatten(-2)), exponent.squeeze(-1).to(torch.uint8)


def decode_e2m1_blocks(pairs: Tensor, scales: Tensor) -> Tensor:
    """What encode_e2m1 encoded: fp32 [..., d]."""
    values = _blocks(decode_e2m1(pairs), _E8M0_BLOCK)
    return (values * _power(scales.int()).unsqueeze(-1)).flatten(-2)


def encode_e2m1_e4m3(x: Tensor, largest_scale: float = E4M3FN_MAX) -> tuple[Tensor, Tensor]:
    """x [..., d] in blocks of 16: pairs uint8 [..., d / 2] (e2m1) and scales uint8 [..., d / 16] (e4m3fn).

    A scale is the block's maximum, at least 6 * 2^-9, divided by 6 and rounded; at most `largest_scale`, 448 or
    the device's 240.
    """
    blocks = _blocks(x.float(), _E4M3_BLOCK)
    amax = _block_maximum(blocks, E2M1_MAX * 2.0**-9)
    codes = (amax / E2M1_MAX).clamp(max=largest_scale).to(torch.float8_e4m3fn).view(torch.uint8)
    nibbles = e2m1_codes(blocks / _E4M3FN_VALUES.to(x.device)[codes.int()])
    return _pairs(nibbles.flatten(-2)), codes.squeeze(-1)


def decode_e2m1_e4m3(pairs: Tensor, scales: Tensor) -> Tensor:
    """What encode_e2m1_e4m3 encoded: fp32 [..., d]."""
    values = _blocks(decode_e2m1(pairs), _E4M3_BLOCK)
    return (values * _E4M3FN_VALUES.to(pairs.device)[scales.int()].unsqueeze(-1)).flatten(-2)


def e2m1_codes(x: Tensor) -> Tensor:
    """The nearest e2m1 code of each value, in the low nibble: uint8. Ties go to the even code; beyond 6 it is 6."""
    size = x.abs()
    steps = (size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0)
    magnitude = torch.stack([step.to(torch.uint8) for step in steps]).sum(dim=0, dtype=torch.uint8)
    return magnitude | (torch.signbit(x).to(torch.uint8) << 3)


def encode_window(x: Tensor, largest: float = E4M3FN_MAX) -> Tensor:
    """x [..., 512] as window records: uint8 [..., 528]."""
    return torch.cat(encode_e4m3(x, largest), dim=-1)


def decode_window(records: Tensor) -> Tensor:
    """Window records uint8 [..., 528] -> bf16 [..., 512], exactly."""
    return decode_e4m3(records[..., :_HEAD_DIM], records[..., _HEAD_DIM:]).to(torch.bfloat16)


def encode_compressed(x: Tensor, largest_scale: float = E4M3FN_MAX) -> Tensor:
    """x [..., 512] as compressed records: uint8 [..., 288]."""
    return torch.cat(encode_e2m1_e4m3(x, largest_scale), dim=-1)


def decode_compressed(records: Tensor) -> Tensor:
    """Compressed records uint8 [..., 288] -> bf16 [..., 512], exactly."""
    return decode_e2m1_e4m3(records[..., : _HEAD_DIM // 2], records[..., _HEAD_DIM // 2 :]).to(torch.bfloat16)


def encode_index_page(keys: Tensor) -> Tensor:
    """Index keys [..., entries, 128] of one page: uint8 [..., entries * 68], all pairs and then all scales."""
    return torch.cat([part.flatten(-2) for part in encode_e2m1(keys)], dim=-1)


def decode_index_page(page: Tensor) -> Tensor:
    """A page uint8 [..., entries * 68] -> bf16 [..., entries, 128], exactly."""
    entries = page.shape[-1] // INDEX_BYTES
    split = entries * _INDEX_DIM // 2
    pairs, scales = page[..., :split], page[..., split:]
    return decode_e2m1_blocks(_blocks(pairs, _INDEX_DIM // 2), _blocks(scales, _INDEX_DIM // _E8M0_BLOCK)).bfloat16()


def _blocks(x: Tensor, size: int) -> Tensor:
    """x [..., d] as [..., d / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def _block_maximum(blocks: Tensor, floor: float) -> Tensor:
    return blocks.abs().amax(dim=-1, keepdim=True).clamp(min=floor)


def _scale_exponent(amax: Tensor, largest: float) -> Tensor:
    """Biased exponent of the smallest power of two s with amax / s <= largest, without rounding: int32."""
    bits = amax.view(torch.int32)
    limit = int(torch.tensor(largest).view(torch.int32))
    fraction = (1 << MANTISSA_BITS) - 1
    above = ((bits & fraction) > (limit & fraction)).to(torch.int32)
    return (bits >> MANTISSA_BITS) - (limit >> MANTISSA_BITS) + _BIAS + above


def _power(exponent: Tensor) -> Tensor:
    return (exponent << MANTISSA_BITS).view(torch.float32)


def _pairs(nibbles: Tensor) -> Tensor:
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)

"""A decode step of the kind that is served: fp8 weights, an fp8 cache written in place, fp8 activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.backend.harness import E8, F8, values

BLOCK = 32


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in blocks of 32: e4m3fn values and their e8m0 scales, no value beyond 224."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1).clamp(min=1e-4) / 224).to(E8)
    scale = torch.where(blocks.abs().amax(-1) > scale.float() * 224, (scale.float() * 2).to(E8), scale)
    return (blocks / scale.float().unsqueeze(-1)).to(F8).flatten(-2), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 values of fp8 codes with one e8m0 scale for every 32 columns."""
    return (codes.float().unflatten(-1, (-1, BLOCK)) * scale.float().unsqueeze(-1)).flatten(-2).bfloat16()


class Linear(nn.Module):
    """y = x w^T with x and w in blocks of fp8."""

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        super().__init__()
        codes, scale = quantize(values(rows, columns, seed=seed, scale=0.2))
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return dequantize(*quantize(x)) @ dequantize(self.weight, self.scale).t()


class DecodeStep(nn.Module):
    """Attention over a cache of fp8 records with e8m0 scales, then a gated feed-forward, both residual."""

    def __init__(self, hidden: int = 64, heads: int = 2, length: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(3 * hidden, hidden, seed=1)
        self.out = Linear(hidden, hidden, seed=2)
        self.up = Linear(2 * hidden, hidden, seed=3)
        self.down = Linear(hidden, hidden, seed=4)
        self.norm = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("cache", torch.zeros(length, 2, hidden, dtype=F8))
        self.register_buffer("scales", torch.ones(length, 2, hidden // BLOCK).to(E8))

    def forward(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        x = x + self.out(self.attend(x * self.norm, at, mask))
        gate, up = self.up(x * self.norm).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)

    def attend(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        codes, scales = quantize(torch.stack([key, value], 1))
        self.cache.index_put_((at,), codes)
        self.scales.view(torch.uint8).index_put_((at,), scales.view(torch.uint8))
        keys, rows = dequantize(self.cache, self.scales).unflatten(-1, (self.heads, -1)).unbind(1)
        scores = torch.einsum("bhd,lhd->bhl", query.unflatten(-1, (self.heads, -1)), keys).float()
        weights = torch.softmax(scores.masked_fill(mask, float("-inf")), -1).bfloat16()
        return torch.einsum("bhl,lhd->bhd", weights, rows).flatten(-2)


def step_arguments(step: int, hidden: int = 64, length: int = 8) -> tuple[Any, ...]:
    """Input [1, hidden], position [1] and mask [length] of one step."""
    return values(1, hidden, seed=step, scale=1).bfloat16(), torch.tensor([step]), torch.arange(length) > step

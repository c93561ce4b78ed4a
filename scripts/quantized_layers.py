"""What compiling is timed on: layers whose seven products take fp8 weights and quantize their activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

F8 = torch.float8_e4m3fn
HIDDEN, HEADS, POSITIONS = 64, 2, 16


class QuantizedLinear(nn.Module):
    """y = x w^T, with x rounded to fp8 by one scale a row, and w in fp8 with one scale a row."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(rows, columns) * 10).to(F8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(rows, 1) * 0.01, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 224
        codes = (values / scale).to(F8)
        weight = (self.weight.float() * self.scale).bfloat16()
        product: Tensor = (codes.float() * scale).bfloat16() @ weight.t()
        return product


class Layer(nn.Module):
    """Attention over an fp8 cache that is written in place, then a gated feed-forward, both residual."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        h = HIDDEN
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(h).bfloat16(), requires_grad=False) for _ in range(2))
        self.query, self.key, self.value, self.out = (QuantizedLinear(h, h) for _ in range(4))
        self.gate, self.up, self.down = QuantizedLinear(2 * h, h), QuantizedLinear(2 * h, h), QuantizedLinear(h, 2 * h)
        self.register_buffer("keys", torch.zeros(POSITIONS, h, dtype=F8))
        self.register_buffer("values", torch.zeros(POSITIONS, h, dtype=F8))

    def forward(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        x = x + self.out(self.attend(_normalized(x, self.norms[0]), at, mask))
        normalized = _normalized(x, self.norms[1])
        gated = nn.functional.silu(self.gate(normalized)) * self.up(normalized)
        result: Tensor = x + self.down(gated)
        return result

    def attend(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        query = self.query(x).view(-1, HEADS, HIDDEN // HEADS)
        self.keys.index_put_((at,), self.key(x).to(F8))
        self.values.index_put_((at,), self.value(x).to(F8))
        keys, values = (cache.bfloat16().view(-1, HEADS, HIDDEN // HEADS) for cache in (self.keys, self.values))
        scores = torch.einsum("bhd,lhd->bhl", query, keys).float()
        weights = torch.softmax(scores.masked_fill(mask, float("-inf")), -1).bfloat16()
        return torch.einsum("bhl,lhd->bhd", weights, values).flatten(-2)


def _normalized(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    return (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight


class Layers(nn.Module):
    """Layers one after the other, each with weights of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, at, mask)
        return x


def step_arguments() -> tuple[Tensor, Tensor, Tensor]:
    """Streams [1, hidden] of one token, its position [1], and which positions it does not see."""
    return torch.randn(1, HIDDEN).bfloat16(), torch.tensor([3]), torch.arange(POSITIONS) > 3

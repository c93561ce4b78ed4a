"""The block of `example_model.py` in float64, from an unprepared checkpoint's own values.

Nothing of the package is used here: weights are dequantized by torch's casts and written-out definitions, so
that agreement says something about both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from example_model import ROUTED_SCALING, STREAMS, SWIGLU_LIMIT, BlockDims
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EPS, _NORM_EPS = 1e-6, 1e-20

Round = Callable[[Tensor], Tensor]


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Values of a weight as stored: e4m3fn [n, k] or two e2m1 values a byte [n, k/2], times e8m0 scales."""
    powers = torch.exp2(scale.view(torch.uint8).double() - 127)
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8)
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
        wide = values[torch.stack([codes & 15, codes >> 4], dim=-1).int()].flatten(-2)
    else:
        wide = weight.double()
    rows, columns = wide.shape
    block_rows = 1 if powers.shape[0] == rows else 32
    spread = powers.repeat_interleave(block_rows, dim=0)[:rows].repeat_interleave(32, dim=1)[:, :columns]
    return wide * spread


def as_it_is(x: Tensor) -> Tensor:
    """No rounding."""
    return x


def to_bf16(x: Tensor) -> Tensor:
    """Rounded to bf16, as activations are stored."""
    return x.to(torch.bfloat16).double()


def to_e4m3fn(x: Tensor) -> Tensor:
    """Rounded to e4m3fn up to 448 in blocks of 32 with power-of-two scales, as the model was made for."""
    blocks = x.view(*x.shape[:-1], -1, 32)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    rounded = (blocks / scale).float().to(torch.float8_e4m3fn).double() * scale
    return rounded.view(x.shape)


@dataclass(frozen=True)
class Rounding:
    """What happens to activations: `store` after each operation, `quantize` before they meet fp8 weights."""

    store: Round
    quantize: Round


EXACT = Rounding(as_it_is, as_it_is)
AS_SERVED = Rounding(to_bf16, to_e4m3fn)


@dataclass
class ReferenceBlock:
    """One layer's block; `tensors` are the source's, by their names without the layer's prefix."""

    dims: BlockDims
    tensors: Mapping[str, Tensor]
    rounding: Rounding
    cache: list[Tensor] = field(default_factory=list)

    def step(self, residual: Tensor) -> Tensor:
        """residual float64 [4, h] of the next token -> float64 [4, h]."""
        post, comb, x = self._mixes(residual, "attn")
        residual = self._post(self._attention(self._norm(x, "attn_norm")), residual, post, comb)
        post, comb, x = self._mixes(residual, "ffn")
        return self._post(self._experts(self._norm(x, "ffn_norm")), residual, post, comb)

    def route(self, x: Tensor) -> Tensor:
        """The weight of each expert, zero for those that are not chosen."""
        affinity = torch.log1p(torch.exp(self._plain("ffn.gate.weight") @ x)).sqrt()
        chosen = torch.topk(affinity + self._plain("ffn.gate.bias"), self.dims.chosen).indices
        kept = torch.zeros_like(affinity)
        kept[chosen] = affinity[chosen]
        return kept / kept.sum() * ROUTED_SCALING

    def _plain(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def _weight(self, module: str) -> Tensor:
        return dequantize(self.tensors[f"{module}.weight"], self.tensors[f"{module}.scale"])

    def _linear(self, x: Tensor, module: str) -> Tensor:
        return self.rounding.store(self._weight(module) @ self.rounding.quantize(x))

    def _norm(self, x: Tensor, module: str) -> Tensor:
        return self.rounding.store(x / (x.square().mean() + _NORM_EPS).sqrt() * self._plain(f"{module}.weight"))

    def _mixes(self, residual: Tensor, part: str) -> tuple[Tensor, Tensor, Tensor]:
        flat = residual.flatten()
        raw = self._plain(f"hc_{part}_fn") @ flat / (flat.square().mean() + _NORM_EPS).sqrt()
        scale, base = self._plain(f"hc_{part}_scale"), self._plain(f"hc_{part}_base")
        factors = torch.cat([scale[0].expand(STREAMS), scale[1].expand(STREAMS), scale[2].expand(STREAMS**2)])
        logits = raw * factors + base
        pre = torch.sigmoid(logits[:STREAMS]) + _EPS
        comb = torch.softmax(logits[2 * STREAMS :].view(STREAMS, STREAMS), dim=-1) + _EPS
        comb = comb / (comb.sum(0, keepdim=True) + _EPS)
        for _ in range(19):
            comb = comb / (comb.sum(1, keepdim=True) + _EPS)
            comb = comb / (comb.sum(0, keepdim=True) + _EPS)
        return 2 * torch.sigmoid(logits[STREAMS : 2 * STREAMS]), comb, self.rounding.store(pre @ residual)

    def _post(self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return self.rounding.store(post[:, None] * x[None, :] + comb.T @ residual)

    def _attention(self, x: Tensor) -> Tensor:
        dims = self.dims
        self.cache.append(self._norm(self._linear(x, "attn.wkv"), "attn.kv_norm"))
        keys = torch.stack(self.cache)
        query = self._linear(self._norm(self._linear(x, "attn.wq_a"), "attn.q_norm"), "attn.wq_b")
        scores = query.view(dims.heads, dims.head_dim) @ keys.T / math.sqrt(dims.head_dim)
        with_sink = torch.cat([scores, self._plain("attn.attn_sink")[:, None]], dim=1)
        mixed = self.rounding.store(torch.softmax(with_sink, dim=1)[:, :-1] @ keys)
        groups = zip(mixed.view(dims.o_groups, -1), self._weight("attn.wo_a").chunk(dims.o_groups), strict=True)
        outputs = [self.rounding.store(weight @ self.rounding.quantize(part)) for part, weight in groups]
        return self._linear(torch.cat(outputs), "attn.wo_b")

    def _experts(self, x: Tensor) -> Tensor:
        total = self._expert(x, "ffn.shared_experts")
        for expert, weight in enumerate(self.route(x)):
            if weight > 0:
                total = total + weight * self._expert(x, f"ffn.experts.{expert}")
        return self.rounding.store(total)

    def _expert(self, x: Tensor, module: str) -> Tensor:
        store, quantize = self.rounding.store, self.rounding.quantize
        gate, up = (store(self._weight(f"{module}.{name}") @ quantize(x)) for name in ("w1", "w3"))
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        inner = store(gate * torch.sigmoid(gate) * up)
        return store(self._weight(f"{module}.w2") @ quantize(inner))

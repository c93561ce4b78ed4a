"""The layer of `example_model.py` in float64, token by token, from an unprepared checkpoint's own values.

Nothing of the package is used here: weights are dequantized by torch's casts and written-out definitions, caches are
lists of all tokens, so that agreement says something about both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from example_dims import ROUTED_SCALING, STREAMS, SWIGLU_LIMIT, BlockDims
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


def to_e2m1(x: Tensor) -> Tensor:
    """Rounded to e2m1 in blocks of 32 with power-of-two scales."""
    blocks = x.view(*x.shape[:-1], -1, 32)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=6 * 2.0**-126)
    return _nearest_e2m1(blocks, torch.exp2(torch.ceil(torch.log2(amax / 6)))).view(x.shape)


def to_e2m1_of_e4m3(x: Tensor) -> Tensor:
    """Rounded to e2m1 in blocks of 16 whose scales are e4m3fn numbers."""
    blocks = x.view(*x.shape[:-1], -1, 16)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=6 * 2.0**-9)
    scale = (amax.float() / 6).to(torch.float8_e4m3fn).double()
    return _nearest_e2m1(blocks, scale).view(x.shape)


def _nearest_e2m1(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest e2m1 number times scale; of two equally near the one with the even code."""
    numbers = torch.tensor(_E2M1, dtype=torch.float64)
    distance = ((x / scale).abs().unsqueeze(-1) - numbers).abs()
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = even_first[distance[..., even_first].argmin(dim=-1)]
    return numbers[code] * x.sign() * scale


@dataclass(frozen=True)
class Rounding:
    """What happens to activations."""

    store: Round
    """After each operation."""
    quantize: Round
    """Before they meet fp8 weights, and before a window keeps them."""
    entry: Round
    """Before a compressed cache keeps them."""
    index: Round
    """To queries and keys of the index."""


EXACT = Rounding(as_it_is, as_it_is, as_it_is, as_it_is)
AS_SERVED = Rounding(to_bf16, to_e4m3fn, to_e2m1_of_e4m3, to_e2m1)


@dataclass
class Source:
    """What a layer that makes entries or chooses among them shares with those behind it."""

    entries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    """The entries that the current token attends to."""
    blocks: set[int] = field(default_factory=set)
    """The blocks of entries that later layers may choose from."""


@dataclass
class ReferenceBlock:
    """One layer; `tensors` are the checkpoint's, by their names without the layer's prefix.

    `sources` are those of all layers by number: a layer reads what the layers that it follows have left there.
    """

    dims: BlockDims
    tensors: Mapping[str, Tensor]
    rounding: Rounding
    sources: Mapping[int, Source]
    window: list[Tensor] = field(default_factory=list)
    group: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Score and latent of the tokens whose group is not complete."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """What was dequantized."""

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
        if module not in self.weights:
            self.weights[module] = dequantize(self.tensors[f"{module}.weight"], self.tensors[f"{module}.scale"])
        return self.weights[module]

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
        dims, store = self.dims, self.rounding.store
        position = len(self.window)
        lora = self._norm(self._linear(x, "attn.wq_a"), "attn.q_norm")
        query = self._linear(lora, "attn.wq_b").view(dims.heads, dims.head_dim)
        query = self._rotated(query, position, dims.rope_dim)
        key = self._norm(self._linear(x, "attn.wkv"), "attn.kv_norm")
        self.window.append(self.rounding.quantize(self._rotated(key, position, dims.rope_dim)))
        keys = torch.stack([*self.window[-dims.window :], *self._entries(x, lora, position)])
        scores = query @ keys.T / math.sqrt(dims.head_dim)
        with_sink = torch.cat([scores, self._plain("attn.attn_sink")[:, None]], dim=1)
        mixed = store(torch.softmax(with_sink, dim=1)[:, :-1] @ keys)
        mixed = self._rotated(mixed, -position, dims.rope_dim)
        groups = zip(mixed.view(dims.o_groups, -1), self._weight("attn.wo_a").chunk(dims.o_groups), strict=True)
        outputs = [store(weight @ self.rounding.quantize(part)) for part, weight in groups]
        return self._linear(torch.cat(outputs), "attn.wo_b")

    def _rotated(self, x: Tensor, position: int, width: int) -> Tensor:
        """The last `width` columns as complex numbers, each turned by its frequency times position."""
        angles = torch.tensor(self.dims.frequencies(width), dtype=torch.float64) * position
        pairs = torch.view_as_complex(x[..., -width:].contiguous().view(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        return self.rounding.store(torch.cat([x[..., :-width], turned], dim=-1))

    def _entries(self, x: Tensor, lora: Tensor, position: int) -> list[Tensor]:
        """The compressed entries that the token at `position` attends to."""
        dims = self.dims
        if dims.ratio == 0:
            return []
        if dims.makes_entries:
            self._make_entry(x, position)
        if dims.chooses:
            self._choose(x, lora, (position + 1) // dims.ratio)
        made = self.sources[dims.kv_source].entries
        return [made[entry] for entry in self.sources[dims.index_source].chosen]

    def _make_entry(self, x: Tensor, position: int) -> None:
        dims, store = self.dims, self.rounding.store
        latent = self._plain("attn.compressor.wkv.weight") @ x
        score = self._plain("attn.compressor.wgate.weight") @ x if dims.ratio > 1 else torch.zeros_like(latent)
        self.group.append((score, latent))
        if (position + 1) % dims.ratio:
            return
        scores, latents = (torch.stack(part) for part in zip(*self.group, strict=True))
        self.group.clear()
        pooled = self._norm(store((torch.softmax(scores, dim=0) * latents).sum(dim=0)), "attn.compressor.norm")
        first, source = position + 1 - dims.ratio, self.sources[dims.layer]
        source.entries.append(self.rounding.entry(self._rotated(pooled, first, dims.rope_dim)))
        key = self._norm(store(self._plain("attn.indexer.wk.weight") @ pooled), "attn.indexer.k_norm")
        source.keys.append(self.rounding.index(self._rotated(key, first, min(dims.rope_dim, dims.index_dim))))

    def _choose(self, x: Tensor, lora: Tensor, visible: int) -> None:
        """Choose among the first `visible` entries; a layer behind the candidates' source only within its blocks."""
        dims, source, size = self.dims, self.sources[self.dims.layer], 8
        query = self._linear(lora, "attn.indexer.wq_b").view(dims.index_heads, dims.index_dim)
        query = self.rounding.index(self._rotated(query, len(self.window) - 1, min(dims.rope_dim, dims.index_dim)))
        weights = self.rounding.store(self._plain("attn.indexer.weights_proj.weight") @ x)
        keys = self.sources[dims.kv_source].keys[:visible]
        scores = {entry: float((weights * (query @ key).clamp(min=0)).sum()) for entry, key in enumerate(keys)}
        if dims.layer > dims.candidate_source:
            source.blocks = self.sources[dims.candidate_source].blocks
            scores = {entry: score for entry, score in scores.items() if entry // size in source.blocks}
        else:
            last = (visible - 1) // size
            best = {
                block: max(scores[e] for e in scores if e // size == block) for block in {e // size for e in scores}
            }
            best = {block: math.inf if block == last else score for block, score in best.items()}
            source.blocks = set(sorted(best, key=lambda block: -best[block])[: dims.candidates])
        source.chosen = sorted(sorted(scores, key=lambda entry: -scores[entry])[: dims.top_k])

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

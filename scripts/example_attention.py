"""Attention of the example: window, compressed entries and the choice among them, for one sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from example_arithmetic import Arithmetic
from example_dims import BlockDims
from example_modules import Fp8Linear, GroupedFp8Linear, Norm, Plain, frozen
from torch import Tensor, nn

from deepinfer_prep.runtime import attention, index

DRAFTS = 5
"""A step of at most so many tokens goes through the rings, as decoding does; a longer one is a prefill."""

PAGE = 8
"""Entries of a page of the compressed cache."""


class Caches(NamedTuple):
    """What a layer remembers. Layers with one source share all but `window`."""

    window: Tensor
    """[ring + 1, d]."""
    state: Tensor
    """fp32 [1, size, 2, d]: the tokens of a group that is not complete."""
    compressed: Tensor
    """[pages * PAGE + 1, d]."""
    pages: Tensor
    """int32 [1, pages]: where each page of the sequence lies."""
    keys: Tensor
    """[1, index_dim, entries + 1]: keys of the index."""


class Choice(NamedTuple):
    """What a layer that chooses hands to those behind it."""

    entries: Tensor
    """int32 [t, top_k]: what each token attends to."""
    blocks: Tensor
    """int32 [t, candidates]: the blocks of entries that later layers may choose from."""


def new_caches(dims: BlockDims, tokens: int, dtype: torch.dtype, source: Caches | None = None) -> Caches:
    """Caches for a sequence of at most `tokens` tokens; a layer that makes no entries takes those of its source."""
    ring = 1 << (dims.window + DRAFTS).bit_length()
    window = torch.zeros(ring + 1, dims.head_dim, dtype=dtype)
    if source is not None:
        return source._replace(window=window)
    pages = -(-tokens // PAGE)
    return Caches(
        window,
        state=torch.zeros(1, 8, 2, dims.head_dim),
        compressed=torch.zeros(pages * PAGE + 1, dims.head_dim, dtype=dtype),
        pages=torch.arange(pages - 1, -1, -1, dtype=torch.int32).unsqueeze(0),
        keys=torch.zeros(1, dims.index_dim, pages * PAGE + 1, dtype=dtype),
    )


def rotated(x: Tensor, positions: Tensor, dims: BlockDims, width: int, *, back: bool = False) -> Tensor:
    """x [t, ..., d] with its last `width` columns turned by position, pair by pair, in fp32 and rounded once."""
    frequencies = torch.tensor(dims.frequencies(width), device=x.device)
    angles = positions.float().reshape(-1, *[1] * (x.dim() - 1)) * frequencies
    cosine, sine = angles.cos(), -angles.sin() if back else angles.sin()
    kept, turned = x[..., :-width], x[..., -width:].float()
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
    return torch.cat([kept, pairs.flatten(-2).to(x.dtype)], dim=-1)


class Compressor(nn.Module):
    """Makes one entry of every `ratio` tokens."""

    def __init__(self, dims: BlockDims, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.dims, self.arithmetic = dims, arithmetic
        self.wkv = Plain(dims.head_dim, dims.hidden)
        if dims.ratio > 1:
            self.wgate = Plain(dims.head_dim, dims.hidden)
        self.norm = Norm(dims.head_dim)

    def forward(self, x: Tensor, caches: Caches, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store what x [t, h] completes; returns latents [c, d] and the entries int32 [c] they belong to, or -1."""
        pooled, entries = self._pooled(x, caches, positions)
        latents = self.norm(pooled)
        first_tokens = entries.clamp(min=0) * self.dims.ratio
        kept = self.arithmetic.entry(rotated(latents, first_tokens, self.dims, self.dims.rope_dim))
        rows = attention.entry_rows(entries, caches.pages, torch.zeros_like(entries), PAGE)
        attention.store_rows(caches.compressed, rows, kept)
        return latents, entries

    def _pooled(self, x: Tensor, caches: Caches, positions: Tensor) -> tuple[Tensor, Tensor]:
        ratio, dtype, count = self.dims.ratio, self.arithmetic.dtype, x.shape[0]
        if ratio == 1:
            return self.wkv(x).to(dtype), positions.int()
        score, latent, slots = self.wgate(x), self.wkv(x), torch.zeros_like(positions)
        if count <= DRAFTS:
            pooled = attention.compress_and_update_state_decode(
                score, latent, caches.state, slots, positions + 1, DRAFTS, ratio, dtype
            )
            return pooled, attention.stored_entries(positions, ratio)
        most = count // ratio + 1
        none, ends = slots[:1], positions[-1:] + 1
        pooled = attention.compress_and_update_state_prefill(
            score, latent, caches.state, none, slots[:most], torch.cat([none, none + count]),
            torch.cat([none, ends]), torch.cat([none, none + most]), ratio, dtype=dtype,
        )  # fmt: skip
        groups = positions[:1] // ratio + torch.arange(most, device=x.device)
        return pooled, torch.where((groups + 1) * ratio <= ends, groups, -1).int()


class Indexer(nn.Module):
    """Chooses the entries that a token attends to."""

    def __init__(self, dims: BlockDims, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.dims, self.arithmetic = dims, arithmetic
        self.rope_dim = min(dims.rope_dim, dims.index_dim)
        self.wq_b = Fp8Linear(dims.index_heads * dims.index_dim, dims.q_lora, arithmetic)
        self.weights_proj = Plain(dims.index_heads, dims.hidden)
        if dims.makes_entries:
            self.wk = Plain(dims.index_dim, dims.head_dim)
            self.k_norm = Norm(dims.index_dim)

    def store_keys(self, latents: Tensor, entries: Tensor, caches: Caches) -> None:
        """Keep the keys of new entries: latents [c, d], entries int32 [c]."""
        dims = self.dims
        keys = self.k_norm(self.wk(latents).to(self.arithmetic.dtype))
        keys = self.arithmetic.index(rotated(keys, entries.clamp(min=0) * dims.ratio, dims, self.rope_dim))
        index.store_keys(caches.keys, keys, torch.zeros_like(entries), entries)

    def forward(self, x: Tensor, lora: Tensor, caches: Caches, positions: Tensor, before: Choice | None) -> Choice:
        """x [t, h], lora [t, q_lora] -> what each token attends to."""
        dims = self.dims
        queries = self.wq_b(lora).view(-1, dims.index_heads, dims.index_dim)
        queries = self.arithmetic.index(rotated(queries, positions, dims, self.rope_dim))
        weights = self.weights_proj(x).to(self.arithmetic.dtype).float()
        weights = weights * (dims.index_dim * dims.index_heads) ** -0.5
        klen = attention.visible_entries(positions, dims.ratio)
        scores = index.index_score(queries, caches.keys, weights, klen, caches.keys.shape[-1] - 1)
        if before is not None and dims.layer > dims.candidate_source:
            scores, blocks = index.within_candidates(scores, before.blocks), before.blocks
        else:
            blocks = index.candidate_blocks(scores, klen, dims.candidates)
        return Choice(index.top_k_positions(scores, klen, dims.top_k), blocks)


class Attention(nn.Module):
    """Attention of a step's tokens over the window and, in layers with compression, over chosen entries."""

    def __init__(self, dims: BlockDims, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.dims, self.arithmetic = dims, arithmetic
        width = dims.heads * dims.head_dim
        self.wq_a = Fp8Linear(dims.q_lora, dims.hidden, arithmetic)
        self.q_norm = Norm(dims.q_lora)
        self.wq_b = Fp8Linear(width, dims.q_lora, arithmetic)
        self.wkv = Fp8Linear(dims.head_dim, dims.hidden, arithmetic)
        self.kv_norm = Norm(dims.head_dim)
        self.attn_sink = frozen(dims.heads, dtype=torch.float32)
        self.wo_a = GroupedFp8Linear(dims.o_groups, dims.o_lora, width // dims.o_groups, arithmetic)
        self.wo_b = Fp8Linear(dims.hidden, dims.o_groups * dims.o_lora, arithmetic)
        if dims.makes_entries:
            self.compressor = Compressor(dims, arithmetic)
        if dims.chooses:
            self.indexer = Indexer(dims, arithmetic)

    def forward(
        self, x: Tensor, caches: Caches, positions: Tensor, choice: Choice | None
    ) -> tuple[Tensor, Choice | None]:
        """x [t, h], positions int32 [t] in order, choice of the layers before -> [t, h], choice."""
        dims = self.dims
        lora = self.q_norm(self.wq_a(x))
        queries = rotated(self.wq_b(lora).view(-1, dims.heads, dims.head_dim), positions, dims, dims.rope_dim)
        keys = self.arithmetic.window(rotated(self.kv_norm(self.wkv(x)), positions, dims, dims.rope_dim))
        rows, lists = self._window(keys, caches, positions)
        scale = dims.head_dim**-0.5
        if dims.ratio == 0:
            mixed = attention.sparse_attn(queries, rows, self.attn_sink, lists, scale)
        else:
            choice = self._choose(x, lora, caches, positions, choice)
            entries = attention.entry_rows(choice.entries, caches.pages, torch.zeros_like(positions), PAGE)
            mixed = attention.sparse_attn_two_caches(
                queries, rows, lists, caches.compressed, entries, self.attn_sink, scale
            )
        mixed = rotated(mixed, positions, dims, dims.rope_dim, back=True)
        return self.wo_b(self.wo_a(mixed.flatten(1))), choice

    def _choose(self, x: Tensor, lora: Tensor, caches: Caches, positions: Tensor, choice: Choice | None) -> Choice:
        """This layer's own choice after storing what it makes, or that of the layer it follows."""
        if self.dims.makes_entries:
            latents, entries = self.compressor(x, caches, positions)
            self.indexer.store_keys(latents, entries, caches)
        if self.dims.chooses:
            return self.indexer(x, lora, caches, positions, choice)  # type: ignore[no-any-return]
        assert choice is not None, f"layer {self.dims.layer} follows the choice of layer {self.dims.index_source}"
        return choice

    def _window(self, keys: Tensor, caches: Caches, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys [t, d]; returns rows and each token's list of them."""
        states, ring, width = torch.zeros_like(positions), caches.window.shape[0] - 1, self.dims.window
        places = attention.window_rows(states, positions, ring)
        if keys.shape[0] <= DRAFTS:
            attention.store_rows(caches.window, places, keys)
            return caches.window, attention.window_lists(states, positions, ring, width)
        history = attention.history_rows(states[:1], positions[:1], ring, width)
        rows = torch.cat([caches.window[history[0].clamp(min=0).long()], keys])
        lists = attention.prefill_window_lists(states, positions, positions[:1], states[:1], width)
        newest = positions > positions[-1:] - ring
        attention.store_rows(caches.window, torch.where(newest, places, -1), keys)
        return rows, lists

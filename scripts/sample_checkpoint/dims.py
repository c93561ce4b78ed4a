"""Dimensions of a DeepSeek-V4.1 model; the defaults are the released ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDims:
    """Dimensions, named after the quantity in config.json that they fill. Defaults are the released model's."""

    hidden: int = 5120
    layers: int = 40
    experts: int = 384
    draft_experts: int = 128
    draft_stages: int = 3
    vocab: int = 129280
    q_lora: int = 1280
    heads: int = 64
    head_dim: int = 512
    o_groups: int = 8
    o_lora: int = 1024
    index_heads: int = 32
    index_dim: int = 128
    expert_inner: int = 2304
    streams: int = 4
    markov_rank: int = 256
    engram_rows: tuple[int, int] = (384006168, 384016682)
    engram_dim: int = 256
    engram_heads: int = 8
    engram_ngram: int = 4
    vision_layers: int = 32
    vision_dim: int = 1024
    vision_inner: int = 2816
    patch: int = 14
    downsample: int = 3

    @property
    def decoder_start(self) -> int:
        """First layer whose compressed keys are not pooled (ratio 1); layers 2 up to here pool by 2."""
        return max(3, self.layers // 2)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """Layers that own a compressor; the others share the one before them."""
        pooled = {self._at(layer) for layer in (8, 14)}
        return tuple(sorted({2, self.decoder_start} | {n for n in pooled if 2 < n < self.decoder_start}))

    @property
    def index_sources(self) -> tuple[int, ...]:
        """Layers that own an indexer: every compressor's layer and some of the later ones."""
        later = {self._at(layer) for layer in (24, 28, 32, 36)}
        return tuple(sorted(set(self.kv_sources) | {n for n in later if n > self.decoder_start}))

    @property
    def engram_layers(self) -> tuple[int, int]:
        """The two layers with an n-gram table."""
        return 1, max(2, self._at(14))

    @property
    def compress_ratios(self) -> tuple[int, ...]:
        """One ratio for each layer, then a 0 for each draft stage."""
        pooled = self.decoder_start - 2
        return (0,) * 2 + (2,) * pooled + (1,) * (self.layers - 2 - pooled) + (0,) * self.draft_stages

    @property
    def draft_targets(self) -> tuple[int, ...]:
        """Layers whose hidden states the first draft stage projects: the last ones, one for each stage."""
        return tuple(range(self.layers - self.draft_stages, self.layers))

    def _at(self, released_layer: int) -> int:
        return round(released_layer * self.layers / 40)

"""Sizes and kind of one layer of the example, from a checkpoint's config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

STREAMS = 4
ROUTED_SCALING = 1.5
SWIGLU_LIMIT = 10.0


@dataclass(frozen=True)
class BlockDims:
    """One layer. `window`, `top_k` and `candidates` are smaller than released, so that few tokens go beyond them."""

    layer: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    experts: int
    chosen: int
    expert_inner: int
    ratio: int
    """Tokens of a compressed entry; 0: the layer has a window only."""
    kv_source: int
    """The layer that makes this layer's compressed entries."""
    index_source: int
    """The layer that chooses among them for this one."""
    candidate_source: int
    """The layer that says in which blocks of entries later layers choose."""
    index_heads: int
    index_dim: int
    rope_theta: float
    yarn: tuple[float, float, float, float] | None
    """Factor, original length, beta_fast and beta_slow, in layers with compression."""
    window: int = 8
    top_k: int = 6
    candidates: int = 2

    @property
    def makes_entries(self) -> bool:
        """Whether the layer owns a compressor."""
        return self.ratio > 0 and self.kv_source == self.layer

    @property
    def chooses(self) -> bool:
        """Whether the layer owns an indexer."""
        return self.ratio > 0 and self.index_source == self.layer

    @classmethod
    def of_config(cls, config: dict[str, Any], layer: int) -> BlockDims:
        """A layer of a checkpoint, from config.json's `text_config`."""
        ratio = config["compress_ratios"][layer]
        yarn = config["rope_scaling"]
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        return cls(
            layer=layer,
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            q_lora=config["q_lora_rank"],
            o_groups=config["o_groups"],
            o_lora=config["o_lora_rank"],
            experts=config["n_routed_experts"],
            chosen=min(2, config["n_routed_experts"]),
            expert_inner=config["moe_intermediate_size"],
            ratio=ratio,
            kv_source=_nearest(config["kv_source_layer_ids"], layer),
            index_source=_nearest(config["index_source_layer_ids"], layer),
            candidate_source=config["candidate_source_layer_id"],
            index_heads=config["index_n_heads"],
            index_dim=config["index_head_dim"],
            rope_theta=config["compress_rope_theta"] if ratio else config["rope_theta"],
            yarn=tuple(yarn[name] for name in names) if ratio else None,
        )

    def frequencies(self, width: int) -> list[float]:
        """Radians a position of each rotated pair of `width` columns."""
        plain = [self.rope_theta ** (-2 * i / width) for i in range(width // 2)]
        if self.yarn is None:
            return plain
        factor, length, fast, slow = self.yarn
        low, high = (self._pair_of(turns, width, length) for turns in (fast, slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        kept = [1 - min(max((i - low) / max(high - low, 0.001), 0), 1) for i in range(width // 2)]
        return [f * keep + f / factor * (1 - keep) for f, keep in zip(plain, kept, strict=True)]

    def _pair_of(self, turns: float, width: int, length: float) -> float:
        """Which pair makes so many turns over the original length."""
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.rope_theta))


def _nearest(sources: list[int], layer: int) -> int:
    return max((source for source in sources if source <= layer), default=-1)

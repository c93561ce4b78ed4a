"""Dimensions of a DeepSeek-V4.1 model: the released ones, scaled ones, and ones that fill a given size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import table

RELEASED_BYTES = 510_286_023_000
"""`metadata.total_size` of the released checkpoint's index."""

EXPERT_AND_REST_SHARE = 0.602
"""Share of the released checkpoint's bytes that is not an engram table with its scales."""


class DimsError(ValueError):
    """The wanted dimensions or size do not give a checkpoint with every kind of tensor."""


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


_KERNEL_WIDTH = 128
"""The kernels take weights whose columns are a multiple of this."""
_WIDE = 192


def scaled(hidden: int, layers: int, experts: int) -> ModelDims:
    """Dimensions in the released model's ratios to `hidden`, rounded to the 32-wide blocks; no engram rows yet."""
    if hidden < 64 or hidden % 64 or layers < 4 or experts < 1:
        raise DimsError(
            f"hidden {hidden}, layers {layers}, experts {experts}: hidden must be a multiple of 64 (packed fp4 rows "
            "of whole 32-wide blocks), layers at least 4 (every kind of attention layer), experts at least 1"
        )
    head_dim = _blocks(hidden / 10)
    heads = 8 * max(1, round(6.4 * hidden / head_dim / 8))
    index_dim = _blocks(hidden / 40)
    return ModelDims(
        hidden=hidden,
        layers=layers,
        experts=experts,
        draft_experts=max(1, experts // 3),
        vocab=_blocks(129280 * (hidden / 5120) ** 2, least=256),
        q_lora=_blocks(hidden / 4),
        heads=heads,
        head_dim=head_dim,
        o_lora=_blocks(1.6 * hidden) // 8,
        index_heads=max(1, round(0.8 * hidden / index_dim)),
        index_dim=index_dim,
        expert_inner=_blocks(0.45 * hidden),
        markov_rank=_blocks(hidden / 20),
        engram_rows=(0, 0),
        engram_heads=max(1, round(8 * hidden / 5120)),
        vision_layers=max(1, round(32 * hidden / 5120)),
        vision_dim=_blocks(hidden / 5),
        vision_inner=_blocks(0.55 * hidden),
    )


def fit(size: int, hidden: int | None = None, layers: int | None = None, experts: int | None = None) -> ModelDims:
    """Dimensions whose tensors come to `size` bytes (at most 32 table rows of 264 bytes fewer).

    Hidden size, layers and experts shrink alike where they are not given; the experts are then chosen so that the
    engram tables get the released share of the bytes, and the tables' rows fill what remains.
    """
    factor = (size / RELEASED_BYTES) ** 0.25
    if layers is None:
        layers = max(4, round(40 * factor))
    if hidden is None:
        start = max(64, 64 * round(5120 * factor / 64))
        hidden = _hidden_for(size, start, layers, 4 if experts is None else experts)
    if experts is None:
        experts = _experts_for(size, hidden, layers)
    return with_engram_bytes(scaled(hidden, layers, experts), size)


def with_engram_bytes(dims: ModelDims, size: int) -> ModelDims:
    """`dims` with engram tables that bring the checkpoint to `size` bytes.

    Like the released row counts, the new ones are no multiples of 32: they leave 24 and 10.
    """
    row_bytes = dims.engram_dim + dims.engram_dim // 32
    rest = table.total_bytes(replace(dims, engram_rows=(0, 0)))
    rows = (size - rest) // row_bytes
    if rows < 128:
        raise DimsError(
            f"the tensors besides the engram tables take {rest:,} bytes, which leaves too little of {size:,} for the "
            "tables; ask for a larger size, or for a smaller hidden size, fewer layers or fewer experts"
        )
    first = rows // 64 * 32 - 8
    second = (rows - first - 10) // 32 * 32 + 10
    return replace(dims, engram_rows=(first, second))


def with_engram_share(dims: ModelDims) -> ModelDims:
    """`dims` with engram tables of the released share of all bytes."""
    rest = table.total_bytes(replace(dims, engram_rows=(0, 0)))
    return with_engram_bytes(dims, round(rest / EXPERT_AND_REST_SHARE))


def _hidden_for(size: int, start: int, layers: int, experts: int) -> int:
    """The largest hidden size from `start` down that leaves the engram tables their share."""
    for hidden in range(start, 64, -64):
        if hidden >= _WIDE and hidden % _KERNEL_WIDTH:
            continue
        if table.total_bytes(scaled(hidden, layers, experts)) <= EXPERT_AND_REST_SHARE * size:
            return hidden
    return 64


def _experts_for(size: int, hidden: int, layers: int) -> int:
    low, high = (table.total_bytes(scaled(hidden, layers, count)) for count in (3, 6))
    fixed, each = 2 * low - high, (high - low) / 3
    return max(4, round((EXPERT_AND_REST_SHARE * size - fixed) / each))


def _blocks(width: float, least: int = 32) -> int:
    """A width in whole 32-wide blocks; wide ones fit the kernels, as the released ones do."""
    unit = _KERNEL_WIDTH if width >= _WIDE else 32
    return max(least, unit * round(width / unit))

"""Finds dimensions of a smaller model: in the released ratios, or such that a checkpoint takes a given size."""

from __future__ import annotations

from dataclasses import replace

from . import table
from .dims import ModelDims

RELEASED_BYTES = 510_286_023_000
"""`metadata.total_size` of the released checkpoint's index."""

EXPERT_AND_REST_SHARE = 0.602
"""Share of the released checkpoint's bytes that is not an engram table with its scales."""


class DimsError(ValueError):
    """The wanted dimensions or size do not give a checkpoint with every kind of tensor."""


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

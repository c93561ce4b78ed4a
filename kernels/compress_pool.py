"""The compressor's pool: each group's tokens blended into one latent, channel by channel."""

import nki
import nki.isa as nisa
import nki.language as nl

from .hc_layout import token_tiles
from .records import my_share
from .tile_pool import P, TilePool, new_pool, sbuf_tile
from .tiles import fold_factor

ELEMENTS = 4096
"""Elements of a tensor that a partition holds at a time: 16 KiB."""

FOLD_COLUMNS = 64
"""Columns that are not split further: 256 bytes of fp32."""


@nki.jit
def kernel(score: nl.ndarray, latent: nl.ndarray) -> nl.ndarray:
    """The sum over r of softmax(score) * latent: fp32 [g, r, d] each -> bf16 [g, d]. A grid of 2 halves the columns."""
    out = nl.ndarray((score.shape[0], score.shape[2]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    pool_groups(out, score, latent)
    return out


def pool_groups(out: nl.ndarray, score: nl.ndarray, latent: nl.ndarray) -> None:
    """The pool of this program's columns, rounded once to the type of out [g, d] in HBM."""
    groups, members, columns = score.shape
    assert 1 <= members <= P, f"a group has {members} tokens, must be 1 to {P}"
    share = my_share(columns)
    mine = nl.ds(share.first, share.size)
    pool = new_pool()
    for tile in token_tiles(groups):
        rows = nl.ds(tile.first, tile.rows)
        segments = _segments(share.size, members, tile.rows)
        width = share.size // segments
        to = out[rows, mine].reshape_dim(1, (segments, width))
        scores = score[rows, :, mine].reshape_dim(2, (segments, width)).permute((0, 2, 1, 3))
        latents = latent[rows, :, mine].reshape_dim(2, (segments, width)).permute((0, 2, 1, 3))
        for first in range(0, width, ELEMENTS // members):
            end = min(width, first + ELEMENTS // members)
            _pool(pool, to[:, :, first:end], scores[:, :, :, first:end], latents[:, :, :, first:end])


def _segments(columns: int, members: int, rows: int) -> int:
    """How many partitions a group's columns take when `rows` groups share the 128 partitions."""
    unit = min(FOLD_COLUMNS, ELEMENTS // members)
    while columns % unit != 0:
        unit = unit // 2
    return fold_factor(columns // unit, rows)


def _pool(pool: TilePool, out: nl.ndarray, score: nl.ndarray, latent: nl.ndarray) -> None:
    """out [groups, segments, columns] from score and latent fp32 [groups, segments, members, columns], in HBM."""
    groups, segments, members, width = score.shape
    rows = groups * segments
    scores = sbuf_tile(pool, "scores", (rows, members, width), nl.float32)
    latents = sbuf_tile(pool, "latents", (rows, members, width), nl.float32)
    nisa.dma_copy(dst=scores, src=score)
    nisa.dma_copy(dst=latents, src=latent)
    y = sbuf_tile(pool, "pooled", (rows, width), out.dtype)
    if members == 1:
        nisa.tensor_copy(dst=y, src=latents.reshape((rows, width)))
    elif members == 2:
        _blend_two(pool, y, scores, latents)
    else:
        _blend(pool, y, scores, latents)
    nisa.dma_copy(dst=out, src=y)


def _blend_two(pool: TilePool, y: nl.ndarray, scores: nl.ndarray, latents: nl.ndarray) -> None:
    """Of two numbers, softmax is the sigmoid of their difference: no maximum, and no reciprocal, the slowest step."""
    rows, _, width = scores.shape
    difference = sbuf_tile(pool, "difference", (rows, width), nl.float32)
    nisa.tensor_tensor(dst=difference, data1=scores[:, 1, :], data2=scores[:, 0, :], op=nl.subtract)
    nisa.activation(dst=scores[:, 1, :], op=nl.sigmoid, data=difference)
    nisa.activation(dst=scores[:, 0, :], op=nl.sigmoid, data=difference, scale=-1.0)
    nisa.tensor_tensor(dst=latents, data1=latents, data2=scores, op=nl.multiply)
    nisa.tensor_tensor(dst=y, data1=latents[:, 0, :], data2=latents[:, 1, :], op=nl.add)


def _blend(pool: TilePool, y: nl.ndarray, scores: nl.ndarray, latents: nl.ndarray) -> None:
    """y [rows, columns] = the sum over members of softmax(scores) * latents; both are overwritten."""
    rows, members, width = scores.shape
    stat = sbuf_tile(pool, "stat", (rows, width), nl.float32)
    nisa.tensor_reduce(dst=stat, op=nl.maximum, data=scores.permute((0, 2, 1)), axis=2)
    nisa.tensor_tensor(dst=scores, data1=scores, data2=stat.expand_dim(1).broadcast(1, members), op=nl.subtract)
    nisa.activation(dst=scores, op=nl.exp, data=scores)
    nisa.tensor_tensor(dst=latents, data1=latents, data2=scores, op=nl.multiply)
    nisa.tensor_reduce(dst=stat, op=nl.add, data=scores.permute((0, 2, 1)), axis=2)
    nisa.reciprocal(dst=stat, data=stat)
    total = sbuf_tile(pool, "total", (rows, width), nl.float32)
    nisa.tensor_reduce(dst=total, op=nl.add, data=latents.permute((0, 2, 1)), axis=2)
    nisa.tensor_tensor(dst=y, data1=total, data2=stat, op=nl.multiply)

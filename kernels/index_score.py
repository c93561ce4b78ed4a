"""Index scores: how well each entry of an index suits each query.

Dimensions, as the docstrings name them:
    tokens      queries that are scored together against the same keys, at most BANK_FP32 / heads
    heads       of a query; a score is the weighted sum over them
    entries     of the index, a column of keys each
    tiles       of 128 entries, which lie on the partitions while heads are summed

Products go to PSUM with entries on partitions and heads side by side, so that weighting takes one pass of VectorE and
summing another, in fp32. Several queries of a sequence are shared between this way and that of index_head_sums, so
that VectorE and TensorE are busy alike. Finished scores go back through a transpose, 128 columns of (token, tile) at
once.
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from .constants import MINUS_INFINITY_BITS
from .hc_layout import token_tiles
from .index_head_sums import heads_fit, load_weight_column, summed_by_tensor, tensor_sums_first
from .index_queries import Queries, load_queries, weigh_heads
from .records import EngineClock, Share, my_share
from .tile_pool import BANK_FP32, P, TilePool, new_pool, psum_tile, sbuf_tile

CHUNK = 8192
"""Entries of a sequence that are in SBUF at a time."""


@dataclass
class Masks(nl.NKIObject):
    """`places` fp32 [128, 128]: which entry of a span stands on partition p of tile t; `hidden` fp32 [128, 1]: -inf."""

    places: nl.ndarray
    hidden: nl.ndarray


@dataclass
class Group(nl.NKIObject):
    """Queries that are scored together. `columns` has TensorE's weights fp32 [tokens * heads, 1] if it sums heads."""

    queries: Queries
    columns: list[nl.ndarray]


@nki.jit
def kernel(q: nl.ndarray, keys: nl.ndarray, weights: nl.ndarray, klen: nl.ndarray, entries: int) -> nl.ndarray:
    """The sum over heads of weights * relu(q . key): fp32 [t, entries], -inf from klen on. A grid of 2 halves entries.

    q bf16 [t, heads, 128], keys bf16 [sequences, 128, n], weights fp32 [t, heads], klen int32 [t]. The first `entries`
    keys of each sequence are scored. Queries of one sequence are consecutive, and every sequence has equally many.
    """
    tokens, _heads, width = q.shape
    sequences, depth, n = keys.shape
    assert width == P, f"queries have {width} elements, must be {P}"
    assert depth == P, f"keys have {depth} elements, must be {P}"
    assert tokens % sequences == 0, f"{tokens} queries of {sequences} sequences: must be equally many each"
    assert 1 <= entries <= n, f"{entries} entries of {n}"
    out = nl.ndarray((tokens, entries), dtype=nl.float32, buffer=nl.shared_hbm)
    pool = new_pool()
    masks = _masks()
    per_sequence = tokens // sequences
    for sequence in range(sequences):
        for tile in token_tiles(per_sequence):
            first = sequence * per_sequence + tile.first
            groups = _load_groups(pool, q, weights, klen, first, first + tile.rows)
            _score(pool, out, keys[sequence], groups, masks)
    return out


def _masks() -> Masks:
    places = nl.ndarray((P, P), dtype=nl.float32, buffer=nl.sbuf)
    whole = nl.ndarray((P, P), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=whole, pattern=[[P, P]], channel_multiplier=1)
    nisa.tensor_copy(dst=places, src=whole)
    hidden = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=hidden, value=MINUS_INFINITY_BITS)
    return Masks(places, hidden.view(nl.float32))


def _load_groups(
    pool: TilePool, q: nl.ndarray, weights: nl.ndarray, klen: nl.ndarray, first: int, end: int
) -> list[Group]:
    """Queries `first` to `end`, shared out so that both ways of summing heads are done at about the same time."""
    heads = q.shape[1]
    both = heads_fit(heads) and end - first > 1
    clock = EngineClock(0, 0)
    groups = []
    for queries in load_queries(pool, q, weights, klen, first, end, P if both else BANK_FP32):
        columns = []
        if both and tensor_sums_first(clock, queries.end - queries.first, heads):
            columns.append(load_weight_column(weights, queries.first, queries.end))
        groups.append(Group(queries, columns))
    return groups


def _score(pool: TilePool, out: nl.ndarray, keys: nl.ndarray, groups: list[Group], masks: Masks) -> None:
    """This program's entries of one sequence: keys bf16 [128, n] in HBM, read once for all groups of queries."""
    mine = _my_entries(out.shape[1])
    for first in range(mine.first, mine.end, CHUNK):
        end = min(mine.end, first + CHUNK)
        chunk = sbuf_tile(pool, "keys", (P, end - first), nl.bfloat16)
        nisa.dma_copy(dst=chunk, src=keys[:, first:end])
        for group in groups:
            queries = group.queries
            for span in _spans(first, end, queries.end - queries.first):
                stationary = chunk[:, span.first - first : span.end - first]
                if len(group.columns) > 0:
                    columns = summed_by_tensor(pool, stationary, queries, group.columns[0])
                else:
                    columns = _weighted_sums(pool, stationary, queries)
                _hide(pool, columns, queries, span.first, masks)
                _store(pool, out[queries.first : queries.end, span.first : span.end], columns)


def _my_entries(entries: int) -> Share:
    """This program's share, in whole tiles."""
    tiles = my_share((entries + P - 1) // P)
    end = min(entries, tiles.end * P)
    return Share(tiles.first * P, end, end - tiles.first * P)


def _spans(first: int, end: int, tokens: int) -> list[Share]:
    """Entries that share a transpose of scores: as many tiles as fit; what is less than a tile is a span of its own."""
    longest = P // tokens * P
    spans = []
    while first < end:
        size = min(longest, end - first)
        if size > P:
            size = size // P * P
        spans.append(Share(first, first + size, size))
        first += size
    return spans


def _weighted_sums(pool: TilePool, keys: nl.ndarray, queries: Queries) -> nl.ndarray:
    """fp32 [entries of a tile, tiles, tokens]: the scores of keys bf16 [128, entries of a span] in SBUF."""
    _, tokens, heads = queries.weights.shape
    rows = min(P, keys.shape[1])
    tiles = keys.shape[1] // rows
    columns = sbuf_tile(pool, "columns", (rows, tiles, tokens), nl.float32)
    per_bank = BANK_FP32 // (tokens * heads)
    for first in range(0, tiles, per_bank):
        count = min(per_bank, tiles - first)
        bank = psum_tile(pool, (rows, count, tokens * heads), nl.float32)
        for index in range(count):
            start = (first + index) * rows
            nisa.nc_matmul(
                dst=bank[:, index, :],
                stationary=keys[:, start : start + rows],
                moving=queries.moving,
                accumulate=False,
            )
        products = bank.reshape((rows, count, tokens, heads))
        weights = queries.weights[0:rows].expand_dim(1).broadcast(1, count)
        weigh_heads(pool, columns[:, first : first + count, :], products, weights)
    return columns


def _hide(pool: TilePool, columns: nl.ndarray, queries: Queries, base: int, masks: Masks) -> None:
    """-inf over what is not visible, whatever is there: the bits are copied, no number is added or multiplied.

    columns [entries of a tile, tiles, tokens] of the entries from `base` on.
    """
    rows, tiles, tokens = columns.shape
    limits = sbuf_tile(pool, "limits", (rows, tokens), nl.float32)
    nisa.tensor_scalar(dst=limits, data=queries.klen[0:rows, :], op0=nl.subtract, operand0=float(base))
    hidden = sbuf_tile(pool, "hidden", (rows, tiles, tokens), nl.uint8)
    nisa.tensor_tensor(
        dst=hidden,
        data1=masks.places[0:rows, 0:tiles].expand_dim(2).broadcast(2, tokens),
        data2=limits.expand_dim(1).broadcast(1, tiles),
        op=nl.greater_equal,
    )
    minus_infinity = masks.hidden[0:rows, :].broadcast(1, tokens * tiles)
    nisa.tensor_copy_predicated(dst=columns, src=minus_infinity, predicate=hidden)


def _store(pool: TilePool, out: nl.ndarray, columns: nl.ndarray) -> None:
    """out fp32 [tokens, entries] in HBM = columns [entries of a tile, tiles, tokens], transposed."""
    rows, tiles, tokens = columns.shape
    bank = psum_tile(pool, (tokens * tiles, rows), nl.float32)
    nisa.nc_transpose(dst=bank, data=columns.permute((0, 2, 1)))
    block = sbuf_tile(pool, "scores", (tokens * tiles, rows), nl.float32)
    nisa.tensor_copy(dst=block, src=bank, engine=nisa.engine.scalar)
    nisa.dma_copy(dst=out.reshape_dim(1, (tiles, rows)), src=block)

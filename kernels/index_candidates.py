"""Index scores of candidates alone: of the blocks of entries that each query's list names.

Dimensions, as the docstrings name them:
    tokens      queries that are worked on together
    count       blocks in a query's list
    groups      of 128 blocks of a list, which lie on the partitions once they are gathered
    members     entries of a block, CANDIDATE_BLOCK

A block's keys lie side by side in memory, so that one DMA with a vector of offsets fetches 128 blocks. TensorE then
turns each member's keys, and scores are made as in index_score, in the same order of sums.
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from .constants import CANDIDATE_BLOCK, MINUS_INFINITY_BITS
from .hc_layout import token_tiles
from .index_queries import Queries, load_queries, weigh_heads
from .records import Share, my_share
from .tile_pool import P, TilePool, new_pool, psum_tile, sbuf_tile

SPAN_GROUPS = P // CANDIDATE_BLOCK
"""Groups whose scores share a transpose: a column for each group and member."""

FAR = float(1 << 25)
"""What is added to the start of an empty place: behind every entry, and exact in fp32."""


@dataclass
class Lists(nl.NKIObject):
    """Lists on chip, a block a partition: `rows` int32 and `starts` fp32 [blocks, tokens, groups], the row to fetch and
    the block's first entry; `limits` fp32 [blocks, tokens, members], klen less the member's place.
    """

    rows: nl.ndarray
    starts: nl.ndarray
    limits: nl.ndarray


@nki.jit
def kernel(q: nl.ndarray, rows: nl.ndarray, weights: nl.ndarray, klen: nl.ndarray, blocks: nl.ndarray) -> nl.ndarray:
    """The sum over heads of weights * relu(q . key) for entries of blocks: fp32 [t, members, count], else -inf.

    q bf16 [t, heads, 128], rows bf16 [sequences, n, 128] with n a multiple of CANDIDATE_BLOCK, weights fp32 [t, heads],
    klen int32 [t], blocks int32 [t, count], below 0 where a place is empty. Scores are -inf there and from klen on.
    Queries of one sequence are consecutive, and every sequence has equally many. A grid of 2 halves the groups.
    """
    tokens, _heads, width = q.shape
    sequences, n, depth = rows.shape
    assert width == P, f"queries have {width} elements, must be {P}"
    assert depth == P, f"keys have {depth} elements, must be {P}"
    assert tokens % sequences == 0, f"{tokens} queries of {sequences} sequences: must be equally many each"
    assert n % CANDIDATE_BLOCK == 0, f"{n} keys of a sequence, must be a multiple of {CANDIDATE_BLOCK}"
    out = nl.ndarray((tokens, CANDIDATE_BLOCK, blocks.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    by_block = rows.reshape((sequences * n // CANDIDATE_BLOCK, CANDIDATE_BLOCK * P))
    minus_infinity = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=minus_infinity, value=MINUS_INFINITY_BITS)
    hidden = minus_infinity.view(nl.float32)
    pool = new_pool()
    per_sequence = tokens // sequences
    for sequence in range(sequences):
        base = sequence * n // CANDIDATE_BLOCK
        for tile in token_tiles(per_sequence):
            first = sequence * per_sequence + tile.first
            for queries in load_queries(pool, q, weights, klen, first, first + tile.rows):
                _score(pool, out, by_block, queries, blocks[queries.first : queries.end, :], base, hidden)
    return out


def _score(
    pool: TilePool,
    out: nl.ndarray,
    by_block: nl.ndarray,
    queries: Queries,
    blocks: nl.ndarray,
    base: int,
    hidden: nl.ndarray,
) -> None:
    """This program's groups of lists int32 [tokens, count] in HBM; a sequence's first block is row `base`."""
    tokens, count = blocks.shape
    limits = _limits(pool, queries)
    for span in _spans(count + count % 2, tokens):
        lists = _load_lists(pool, blocks, span, base, limits)
        for token in range(tokens):
            columns = _weighted_sums(pool, by_block, queries, lists, span, token)
            _hide(pool, columns, lists, token, hidden)
            _store(pool, out[queries.first + token], columns, span.first * P)


def _spans(width: int, tokens: int) -> list[Share]:
    """This program's groups by the transposes that they share; one that is not full is a span of its own.

    `size` of a span is the blocks of each of its groups.
    """
    share = my_share((width + P - 1) // P)
    full = min(share.end, width // P)
    step = max(1, min(SPAN_GROUPS, P // tokens))
    spans = []
    for first in range(share.first, full, step):
        spans.append(Share(first, min(full, first + step), P))
    if share.end > full:
        spans.append(Share(full, full + 1, width - full * P))
    return spans


def _limits(pool: TilePool, queries: Queries) -> nl.ndarray:
    """fp32 [128, tokens, members]: klen less the member's place."""
    tokens = queries.klen.shape[1]
    whole = sbuf_tile(pool, "members", (P, CANDIDATE_BLOCK), nl.int32)
    nisa.iota(dst=whole, pattern=[[1, CANDIDATE_BLOCK]])
    members = sbuf_tile(pool, "places", (P, CANDIDATE_BLOCK), nl.float32)
    nisa.tensor_copy(dst=members, src=whole)
    limits = sbuf_tile(pool, "limits", (P, tokens, CANDIDATE_BLOCK), nl.float32)
    nisa.tensor_tensor(
        dst=limits,
        data1=queries.klen.expand_dim(2).broadcast(2, CANDIDATE_BLOCK),
        data2=members.expand_dim(1).broadcast(1, tokens),
        op=nl.subtract,
    )
    return limits


def _load_lists(pool: TilePool, blocks: nl.ndarray, span: Share, base: int, limits: nl.ndarray) -> Lists:
    """The span's part of lists int32 [tokens, count] in HBM, turned; a place behind the last is empty."""
    tokens, count = blocks.shape
    groups = span.end - span.first
    listed = min(count - span.first * P, groups * span.size) // groups
    entries = sbuf_tile(pool, "entries", (tokens * groups, span.size), nl.int32)
    if listed < span.size:
        nisa.memset(dst=entries, value=-1)
    part = blocks[:, span.first * P : span.first * P + groups * listed]
    nisa.dma_copy(dst=entries[:, 0:listed], src=part.reshape_dim(1, (groups, listed)))
    numbers = sbuf_tile(pool, "numbers", (tokens * groups, span.size), nl.float32)
    nisa.tensor_copy(dst=numbers, src=entries)
    shape = (span.size, tokens, groups)
    turned = psum_tile(pool, shape, nl.float32)
    nisa.nc_transpose(dst=turned, data=numbers)
    rows = sbuf_tile(pool, "rows", shape, nl.int32)
    nisa.tensor_scalar(dst=rows, data=turned, op0=nl.maximum, operand0=0.0, op1=nl.add, operand1=float(base))
    away = sbuf_tile(pool, "away", shape, nl.float32)
    nisa.tensor_scalar(dst=away, data=turned, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=FAR)
    starts = sbuf_tile(pool, "starts", shape, nl.float32)
    nisa.scalar_tensor_tensor(
        dst=starts, data=turned, op0=nl.multiply, operand0=float(CANDIDATE_BLOCK), op1=nl.add, operand1=away
    )
    return Lists(rows, starts, limits[0 : span.size])


def _weighted_sums(
    pool: TilePool, by_block: nl.ndarray, queries: Queries, lists: Lists, span: Share, token: int
) -> nl.ndarray:
    """fp32 [blocks of a group, groups, members]: the scores of one query's candidates."""
    _, _, heads = queries.weights.shape
    size = span.size
    columns = sbuf_tile(pool, "columns", (size, span.end - span.first, CANDIDATE_BLOCK), nl.float32)
    moving = queries.moving[:, token * heads : (token + 1) * heads]
    for group in range(span.first, span.end):
        keys = _gather(pool, by_block, lists.rows[:, token, group - span.first : group - span.first + 1])
        bank = psum_tile(pool, (size, CANDIDATE_BLOCK, heads), nl.float32)
        for member in range(CANDIDATE_BLOCK):
            nisa.nc_matmul(dst=bank[:, member, :], stationary=keys[:, member, :], moving=moving, accumulate=False)
        weights = queries.weights[0:size, token : token + 1, :].broadcast(1, CANDIDATE_BLOCK)
        weigh_heads(pool, columns[:, group - span.first, :], bank, weights)
    return columns


def _gather(pool: TilePool, by_block: nl.ndarray, rows: nl.ndarray) -> nl.ndarray:
    """bf16 [128, members, blocks]: the keys of the blocks that rows int32 [blocks, 1] name, turned."""
    size = rows.shape[0]
    gathered = sbuf_tile(pool, "gathered", (size, CANDIDATE_BLOCK * P), nl.bfloat16)
    nisa.dma_copy(dst=gathered, src=by_block.vector_select(0, rows), dge_mode=nisa.dge_mode.swdge)
    bank = psum_tile(pool, (P, CANDIDATE_BLOCK, size), nl.bfloat16)
    for member in range(CANDIDATE_BLOCK):
        nisa.nc_transpose(dst=bank[:, member, :], data=gathered[:, member * P : (member + 1) * P])
    keys = sbuf_tile(pool, "keys", (P, CANDIDATE_BLOCK, size), nl.bfloat16)
    nisa.tensor_copy(dst=keys, src=bank, engine=nisa.engine.scalar)
    return keys


def _hide(pool: TilePool, columns: nl.ndarray, lists: Lists, token: int, hidden: nl.ndarray) -> None:
    """-inf over empty places and what is not visible: bits are copied, whatever is there."""
    size, groups, members = columns.shape
    mask = sbuf_tile(pool, "mask", (size, groups, members), nl.uint8)
    nisa.tensor_tensor(
        dst=mask,
        data1=lists.starts[:, token, :].expand_dim(2).broadcast(2, members),
        data2=lists.limits[:, token : token + 1, :].broadcast(1, groups),
        op=nl.greater_equal,
    )
    minus_infinity = hidden[0:size, :].broadcast(1, groups * members)
    nisa.tensor_copy_predicated(dst=columns, src=minus_infinity, predicate=mask)


def _store(pool: TilePool, out: nl.ndarray, columns: nl.ndarray, first: int) -> None:
    """Store columns [blocks of a group, groups, members], turned, from column `first` of out [members, count] on."""
    size, groups, members = columns.shape
    bank = psum_tile(pool, (members * groups, size), nl.float32)
    nisa.nc_transpose(dst=bank, data=columns.permute((0, 2, 1)))
    block = sbuf_tile(pool, "scores", (members * groups, size), nl.float32)
    nisa.tensor_copy(dst=block, src=bank)
    kept = min(size, out.shape[1] - first)
    to = out[:, first : first + groups * kept].reshape_dim(1, (groups, kept))
    nisa.dma_copy(dst=to, src=block[:, 0:kept])

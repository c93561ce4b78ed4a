"""What the sparse attention kernels do: each query over its own lists of keys, which are gathered on chip.

Keys are their own values, and every head has a sink.

Dimensions:
    t           queries
    heads       of a query, at most 64; all share the query's keys
    d           columns of a query and of a key, a multiple of 128 up to 512
    n           rows of a cache
    k           entries of a list
    slot        partitions of a query's heads: 32 or 64
    rows        partitions of the queries that are worked on together
    keys, blocks  as in key_lists

Pseudocode, for as many queries as share the partitions:
    gather each query's keys, a partition each, and clear the bits of empty ones
    transpose keys and queries, so that d lies on partitions
    scores = what empty entries add, through one matmul, + q k^T
    p = exp(scale * scores - maximum), in bf16, and its fp32 sum
    out = p k / (sum + exp(sink - maximum))
"""

import nki.isa as nisa
import nki.language as nl

from .attention_parts import copy_out, negate_sinks, scale_out, softmax
from .constants import ATTENTION_HEADS_MAX, ATTENTION_KEYS_MAX
from .engine_balance import charge_vector
from .hc_layout import token_tiles
from .key_lists import key_blocks, load_lists
from .records import EngineClock, KeyBlock, KeyLists, QueryGroup, TokenTile, my_share
from .tile_pool import BANK_FP32, P, TilePool, new_pool, psum_tile, sbuf_tile


def attend(
    q: nl.ndarray, caches: list[nl.ndarray], lists: list[nl.ndarray], sink: nl.ndarray, scale: float
) -> nl.ndarray:
    """bf16 [t, heads, d]: q bf16 [t, heads, d] over the keys of all lists, int32 [t, k] of a cache bf16 [n, d] each.

    scale is at least 2^-20, so that empty entries stay below LOWEST_MAXIMUM.
    """
    tokens, heads, columns = q.shape
    assert heads <= ATTENTION_HEADS_MAX, f"{heads} heads, must be at most {ATTENTION_HEADS_MAX}"
    assert columns % P == 0, f"d is {columns}, must be a multiple of {P}"
    assert columns <= BANK_FP32, f"d is {columns}, must be at most {BANK_FP32}"
    lengths = []
    for entries in lists:
        lengths.append(entries.shape[1])
    blocks = key_blocks(lengths)
    width = blocks[-1].offset + blocks[-1].keys
    assert width <= ATTENTION_KEYS_MAX, f"{width} keys with padding, must be at most {ATTENTION_KEYS_MAX}"
    out = nl.ndarray((tokens, heads, columns), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_share(tokens)
    slot = 32 if heads <= 32 else 64
    pool = new_pool()
    clock = EngineClock(0, 0)
    identity = nl.shared_identity_matrix(P, dtype=nl.bfloat16)
    sinks = _negative_sinks(sink, slot)
    for tile in token_tiles(share.size):
        mine = TokenTile(share.first + tile.first, share.first + tile.end, tile.rows)
        entries = load_lists(lists, mine, blocks)
        for group in _groups(mine, slot):
            values = _gather(pool, clock, caches, entries, blocks, group, mine, columns)
            turned = _turn_queries(pool, clock, q, group)
            scores = _empty_scores(entries, identity, group, mine)
            for query in range(group.count):
                keys = _turn_keys(pool, clock, values[:, query, :, :], blocks)
                _add_products(scores, turned, keys, query, slot)
            shares = nl.ndarray((group.rows, width), dtype=nl.bfloat16, buffer=nl.sbuf)
            inverse = softmax(clock, shares, scores, sinks, scale)
            mixed = _mix(pool, clock, shares, values, blocks, group)
            _store(pool, clock, out, mixed, inverse, group)
    return out


def _groups(tile: TokenTile, slot: int) -> list[QueryGroup]:
    """The queries of a tile by as many as fill the partitions."""
    groups = []
    for first in range(tile.first, tile.end, P // slot):
        count = min(P // slot, tile.end - first)
        groups.append(QueryGroup(first, count, slot, count * slot))
    return groups


def _negative_sinks(sink: nl.ndarray, slot: int) -> nl.ndarray:
    """-sink of each head on the partitions of every query, fp32 [128, 1], infinities replaced by finite bounds."""
    heads = sink.shape[0]
    tile = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0)
    for start in range(0, P, slot):
        nisa.dma_copy(dst=tile[start : start + heads, :], src=sink.expand_dim(1))
    negate_sinks(tile)
    return tile


def _gather(
    pool: TilePool,
    clock: EngineClock,
    caches: list[nl.ndarray],
    entries: KeyLists,
    blocks: list[KeyBlock],
    group: QueryGroup,
    tile: TokenTile,
    columns: int,
) -> nl.ndarray:
    """The keys of a group's queries: bf16 [128, queries, blocks, d], a partition a key; empty ones are zeros.

    An empty entry reads row 0, whatever that holds: its bits are cleared, since 0 times NaN would be NaN.
    """
    values = sbuf_tile(pool, "values", (P, group.count, len(blocks), columns), nl.bfloat16)
    for query in range(group.count):
        place = group.first - tile.first + query
        for index in range(len(blocks)):
            block = blocks[index]
            rows = entries.rows[0 : block.keys, index, place : place + 1]
            keys = values[0 : block.keys, query, index, :]
            nisa.dma_copy(dst=keys, src=caches[block.source].vector_select(0, rows), dge_mode=nisa.dge_mode.swdge)
            words = keys.view(nl.int32)
            mask = entries.masks[0 : block.keys, index, place : place + 1]
            nisa.tensor_scalar(dst=words, data=words, op0=nl.bitwise_and, operand0=mask)
            charge_vector(clock, columns // 2)
    return values


def _turn_queries(pool: TilePool, clock: EngineClock, q: nl.ndarray, group: QueryGroup) -> nl.ndarray:
    """A group's queries with d on partitions: bf16 [128, d / 128, rows]. Rows without a head are zero."""
    _, heads, columns = q.shape
    tile = sbuf_tile(pool, "queries", (group.rows, columns), nl.bfloat16)
    if heads == group.slot:
        block = q[group.first : group.first + group.count]
        nisa.dma_copy(dst=tile, src=block.reshape((group.rows, columns)))
    else:
        nisa.memset(dst=tile, value=0.0)
        for query in range(group.count):
            start = query * group.slot
            nisa.dma_copy(dst=tile[start : start + heads, :], src=q[group.first + query])
    planes = columns // P
    bank = psum_tile(pool, (P, planes, group.rows), nl.bfloat16)
    for plane in range(planes):
        nisa.nc_transpose(dst=bank[:, plane, :], data=tile[:, plane * P : (plane + 1) * P])
    turned = sbuf_tile(pool, "turned queries", (P, planes, group.rows), nl.bfloat16)
    copy_out(clock, turned, bank)
    return turned


def _turn_keys(pool: TilePool, clock: EngineClock, values: nl.ndarray, blocks: list[KeyBlock]) -> nl.ndarray:
    """One query's keys bf16 [128, blocks, d] with d on partitions: bf16 [128, d / 128, keys]."""
    planes = values.shape[2] // P
    turned = sbuf_tile(pool, "keys", (P, planes, blocks[-1].offset + blocks[-1].keys), nl.bfloat16)
    for index in range(len(blocks)):
        block = blocks[index]
        bank = psum_tile(pool, (P, planes, block.keys), nl.bfloat16)
        for plane in range(planes):
            nisa.nc_transpose(dst=bank[:, plane, :], data=values[0 : block.keys, index, plane * P : (plane + 1) * P])
        copy_out(clock, turned[:, :, block.offset : block.offset + block.keys], bank)
    return turned


def _empty_scores(entries: KeyLists, identity: nl.ndarray, group: QueryGroup, tile: TokenTile) -> nl.ndarray:
    """Scores before any product, fp32 [rows, keys] in PSUM: each query's bias on the partitions of all its heads.

    A matmul with a column of the identity for each partition copies it there.
    """
    queries, width = entries.bias.shape
    place = group.first - tile.first
    chosen = nl.ndarray((queries, group.rows), dtype=nl.bfloat16, buffer=nl.sbuf)
    columns = identity[0:queries, place : place + group.count].expand_dim(2).broadcast(2, group.slot)
    nisa.tensor_copy(dst=chosen.reshape_dim(1, (group.count, group.slot)), src=columns)
    scores = nl.ndarray((group.rows, width), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, width, BANK_FP32):
        end = min(width, start + BANK_FP32)
        nisa.nc_matmul(dst=scores[:, start:end], stationary=chosen, moving=entries.bias[:, start:end], accumulate=False)
    return scores


def _add_products(scores: nl.ndarray, queries: nl.ndarray, keys: nl.ndarray, query: int, slot: int) -> None:
    """scores fp32 [rows, keys] += one query's products of heads and keys; both with d on partitions."""
    width = scores.shape[1]
    mine = nl.ds(query * slot, slot)
    for start in range(0, width, BANK_FP32):
        end = min(width, start + BANK_FP32)
        for plane in range(queries.shape[1]):
            nisa.nc_matmul(
                dst=scores[mine, start:end],
                stationary=queries[:, plane, mine],
                moving=keys[:, plane, start:end],
                accumulate=True,
                tile_position=(0, query * slot),
                tile_size=(P, slot),
            )


def _mix(
    pool: TilePool,
    clock: EngineClock,
    shares: nl.ndarray,
    values: nl.ndarray,
    blocks: list[KeyBlock],
    group: QueryGroup,
) -> nl.ndarray:
    """Values weighted by shares, fp32 [rows, d] in PSUM."""
    bank = psum_tile(pool, (P, len(blocks), group.rows), nl.bfloat16)
    turned = sbuf_tile(pool, "shares", (P, len(blocks), group.rows), nl.bfloat16)
    for index in range(len(blocks)):
        block = blocks[index]
        data = shares[:, block.offset : block.offset + block.keys]
        nisa.nc_transpose(dst=bank[0 : block.keys, index, :], data=data)
        copy_out(clock, turned[0 : block.keys, index, :], bank[0 : block.keys, index, :])
    mixed = nl.ndarray((group.rows, values.shape[3]), dtype=nl.float32, buffer=nl.psum)
    for query in range(group.count):
        mine = nl.ds(query * group.slot, group.slot)
        for index in range(len(blocks)):
            keys = blocks[index].keys
            nisa.nc_matmul(
                dst=mixed[mine, :],
                stationary=turned[0:keys, index, mine],
                moving=values[0:keys, query, index, :],
                accumulate=index > 0,
                tile_position=(0, query * group.slot),
                tile_size=(P, group.slot),
            )
    return mixed


def _store(
    pool: TilePool, clock: EngineClock, out: nl.ndarray, mixed: nl.ndarray, inverse: nl.ndarray, group: QueryGroup
) -> None:
    """out = mixed * inverse, rounded once to bf16."""
    _, heads, columns = out.shape
    tile = sbuf_tile(pool, "results", (group.rows, columns), nl.bfloat16)
    scale_out(clock, tile, mixed, inverse)
    if heads == group.slot:
        block = out[group.first : group.first + group.count]
        nisa.dma_copy(dst=block.reshape((group.rows, columns)), src=tile)
    else:
        for query in range(group.count):
            start = query * group.slot
            nisa.dma_copy(dst=out[group.first + query], src=tile[start : start + heads, :])

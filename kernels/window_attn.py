"""Attention over a window of consecutive tokens: the dense form for prefill, without lists or gathers.

Dimensions:
    t           queries, consecutive tokens of one sequence, a multiple of TILE
    w           tokens that a query sees, itself included: 128
    n           w + t rows: the w tokens before the first query, then the queries' own
    heads, d    as in gathered_attention; an even number of heads
    keys        rows that a tile of queries sees some of: TILE + w
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .attention_parts import copy_out, negate_sinks, scale_out, softmax
from .constants import WINDOW, WINDOW_TILE
from .key_lists import EMPTY_SCORE
from .records import EngineClock, my_share
from .tile_pool import BANK_FP32, P, TilePool, new_pool, psum_tile, sbuf_tile

TILE = WINDOW_TILE
KEYS = TILE + WINDOW
BLOCKS = 2
"""Blocks of at most 128 keys: WINDOW keys and TILE keys."""


@nki.jit
def kernel(q: nl.ndarray, kv: nl.ndarray, present: nl.ndarray, sink: nl.ndarray, scale: float) -> nl.ndarray:
    """q bf16 [t, heads, d], kv bf16 [n, d], present int32 [n], sink fp32 [heads] -> bf16 [t, heads, d].

    Query i sees rows i + 1 to i + 128 of kv, but for those where present is below 0. Grid 1 or 2: heads are halved.
    """
    tokens, heads, columns = q.shape
    assert tokens % TILE == 0, f"{tokens} queries, must be a multiple of {TILE}"
    assert heads % 2 == 0, f"{heads} heads, must be even"
    assert columns % P == 0, f"d is {columns}, must be a multiple of {P}"
    assert columns <= BANK_FP32, f"d is {columns}, must be at most {BANK_FP32}"
    out = nl.ndarray((tokens, heads, columns), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_share(heads // 2)
    pool = new_pool()
    clock = EngineClock(0, 0)
    twice = _doubled_identity()
    band = _band()
    sinks = _pairs_of_sinks(sink)
    for first in range(0, tokens, TILE):
        values = _load_keys(pool, kv, present, first)
        keys = _turn_keys(pool, clock, values)
        bias = _bias(pool, band, present, first)
        mine = q[first : first + TILE, 2 * share.first : 2 * share.end, :]
        queries = sbuf_tile(pool, "queries", mine.shape, nl.bfloat16)
        nisa.dma_copy(dst=queries, src=mine)
        for pair in range(share.size):
            turned = _turn_queries(pool, clock, queries[:, 2 * pair : 2 * pair + 2, :])
            scores = _scores(turned, keys, twice, bias)
            shares = nl.ndarray((P, KEYS), dtype=nl.bfloat16, buffer=nl.sbuf)
            index = share.first + pair
            inverse = softmax(clock, shares, scores, sinks[:, index : index + 1], scale)
            tile = sbuf_tile(pool, "results", (P, columns), nl.bfloat16)
            scale_out(clock, tile, _mix(pool, clock, shares, values), inverse)
            for half in range(2):
                rows = tile[half * TILE : (half + 1) * TILE, :]
                nisa.dma_copy(dst=out[first : first + TILE, 2 * index + half, :], src=rows)
    return out


def _doubled_identity() -> nl.ndarray:
    """Two identities side by side, bf16 [TILE, 2 * TILE]: a matmul with it copies a tile to the rows of both heads."""
    identity = nl.shared_identity_matrix(P, dtype=nl.bfloat16)
    twice = nl.ndarray((TILE, 2, TILE), dtype=nl.bfloat16, buffer=nl.sbuf)
    for half in range(2):
        nisa.tensor_copy(dst=twice[:, half, :], src=identity[0:TILE, 0:TILE])
    return twice.reshape((TILE, 2 * TILE))


def _band() -> nl.ndarray:
    """fp32 [TILE, KEYS]: 0 for the keys i + 1 to i + WINDOW of query i, EMPTY_SCORE for the others."""
    band = nl.ndarray((TILE, KEYS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=band, value=0.0)
    nisa.affine_select(
        dst=band,
        pattern=[[1, KEYS]],
        channel_multiplier=-1,
        on_true_tile=band,
        on_false_value=EMPTY_SCORE,
        cmp_op=nl.greater_equal,
        offset=-1,
    )
    nisa.affine_select(
        dst=band,
        pattern=[[-1, KEYS]],
        channel_multiplier=1,
        on_true_tile=band,
        on_false_value=EMPTY_SCORE,
        cmp_op=nl.greater_equal,
        offset=WINDOW,
    )
    return band


def _pairs_of_sinks(sink: nl.ndarray) -> nl.ndarray:
    """Negated sinks, fp32 [128, pairs of heads]: the first head of a pair on the lower half of the partitions."""
    heads = sink.shape[0]
    tile = nl.ndarray((P, heads // 2), dtype=nl.float32, buffer=nl.sbuf)
    pairs = sink.reshape((heads // 2, 2))
    for half in range(2):
        row = pairs[:, half].expand_dim(0).broadcast(0, TILE)
        nisa.dma_copy(dst=tile[half * TILE : (half + 1) * TILE, :], src=row)
    negate_sinks(tile)
    return tile


def _load_keys(pool: TilePool, kv: nl.ndarray, present: nl.ndarray, first: int) -> nl.ndarray:
    """Rows from `first` on, a partition a key: bf16 [128, BLOCKS, d], zeros where no key is present."""
    columns = kv.shape[1]
    values = sbuf_tile(pool, "values", (P, BLOCKS, columns), nl.bfloat16)
    masks = sbuf_tile(pool, "masks", (P, BLOCKS), nl.int32)
    for index in range(BLOCKS):
        size = WINDOW if index == 0 else TILE
        start = first + index * WINDOW
        keys = values[0:size, index, :]
        mask = masks[0:size, index : index + 1]
        nisa.dma_copy(dst=keys, src=kv[start : start + size, :])
        nisa.dma_copy(dst=mask, src=present[start : start + size].expand_dim(1))
        nisa.tensor_scalar(dst=mask, data=mask, op0=nl.greater_equal, operand0=0.0, op1=nl.multiply, operand1=-1.0)
        words = keys.view(nl.int32)
        nisa.tensor_scalar(dst=words, data=words, op0=nl.bitwise_and, operand0=mask)
    return values


def _turn_keys(pool: TilePool, clock: EngineClock, values: nl.ndarray) -> nl.ndarray:
    """Keys with d on partitions: bf16 [128, d / 128, KEYS]."""
    planes = values.shape[2] // P
    turned = sbuf_tile(pool, "keys", (P, planes, KEYS), nl.bfloat16)
    for index in range(BLOCKS):
        size = WINDOW if index == 0 else TILE
        bank = psum_tile(pool, (P, planes, size), nl.bfloat16)
        for plane in range(planes):
            nisa.nc_transpose(dst=bank[:, plane, :], data=values[0:size, index, plane * P : (plane + 1) * P])
        copy_out(clock, turned[:, :, index * WINDOW : index * WINDOW + size], bank)
    return turned


def _bias(pool: TilePool, band: nl.ndarray, present: nl.ndarray, first: int) -> nl.ndarray:
    """The band of a tile of queries without the keys that are not present: bf16 [TILE, KEYS]."""
    here = sbuf_tile(pool, "present", (TILE, KEYS), nl.int32)
    nisa.dma_copy(dst=here, src=present[first : first + KEYS].expand_dim(0).broadcast(0, TILE))
    missing = sbuf_tile(pool, "missing", (TILE, KEYS), nl.float32)
    nisa.tensor_scalar(dst=missing, data=here, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=EMPTY_SCORE)
    bias = sbuf_tile(pool, "bias", (TILE, KEYS), nl.bfloat16)
    nisa.tensor_tensor(dst=bias, data1=band, data2=missing, op=nl.add)
    return bias


def _turn_queries(pool: TilePool, clock: EngineClock, queries: nl.ndarray) -> nl.ndarray:
    """Two heads of a tile of queries, [TILE, 2, d], with d on partitions: bf16 [128, d / 128, 2 * TILE]."""
    planes = queries.shape[2] // P
    bank = psum_tile(pool, (P, planes, 2, TILE), nl.bfloat16)
    for plane in range(planes):
        for half in range(2):
            nisa.nc_transpose(dst=bank[:, plane, half, :], data=queries[:, half, plane * P : (plane + 1) * P])
    turned = sbuf_tile(pool, "turned queries", (P, planes, 2, TILE), nl.bfloat16)
    copy_out(clock, turned, bank)
    return turned.reshape((P, planes, 2 * TILE))


def _scores(queries: nl.ndarray, keys: nl.ndarray, twice: nl.ndarray, bias: nl.ndarray) -> nl.ndarray:
    """Products of two heads' queries and keys on top of the bias, fp32 [2 * TILE, KEYS] in PSUM."""
    scores = nl.ndarray((P, KEYS), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=scores, stationary=twice, moving=bias, accumulate=False)
    for plane in range(queries.shape[1]):
        nisa.nc_matmul(dst=scores, stationary=queries[:, plane, :], moving=keys[:, plane, :], accumulate=True)
    return scores


def _mix(pool: TilePool, clock: EngineClock, shares: nl.ndarray, values: nl.ndarray) -> nl.ndarray:
    """Values weighted by shares, fp32 [2 * TILE, d] in PSUM."""
    mixed = nl.ndarray((P, values.shape[2]), dtype=nl.float32, buffer=nl.psum)
    bank = psum_tile(pool, (P, BLOCKS, P), nl.bfloat16)
    turned = sbuf_tile(pool, "shares", (P, BLOCKS, P), nl.bfloat16)
    for index in range(BLOCKS):
        size = WINDOW if index == 0 else TILE
        data = shares[:, index * WINDOW : index * WINDOW + size]
        nisa.nc_transpose(dst=bank[0:size, index, :], data=data)
        copy_out(clock, turned[0:size, index, :], bank[0:size, index, :])
    for index in range(BLOCKS):
        size = WINDOW if index == 0 else TILE
        nisa.nc_matmul(
            dst=mixed, stationary=turned[0:size, index, :], moving=values[0:size, index, :], accumulate=index > 0
        )
    return mixed

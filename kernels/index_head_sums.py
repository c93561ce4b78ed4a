"""Index scores with heads on the partitions: TensorE weights and sums them, ScalarE does relu, VectorE has no part.

Dimensions as in index_score; tokens * heads is at most 128. A query's heads are a row tile of TensorE by themselves, so
that no query's NaN is multiplied with another's zero weight.
"""

import nki.isa as nisa
import nki.language as nl

from .engine_balance import SCALAR_COST, SHORTEST, TENSOR_COST, VECTOR_COST
from .index_queries import Queries
from .records import EngineClock
from .tile_pool import BANK_FP32, P, TilePool, psum_sums, psum_tile, sbuf_tile

ROW_TILES = (32, 64)
"""Heads that are a row tile of TensorE."""

FP32_PASSES = 4


def heads_fit(heads: int) -> bool:
    """Whether a query's heads are a row tile of TensorE."""
    return heads in ROW_TILES


def load_weight_column(weights: nl.ndarray, first: int, end: int) -> nl.ndarray:
    """Weights of queries `first` to `end`, fp32 [t, heads] in HBM, one under another: fp32 [tokens * heads, 1]."""
    rows = (end - first) * weights.shape[1]
    column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=column, src=weights[first:end, :].reshape((rows, 1)))
    return column


def tensor_sums_first(clock: EngineClock, tokens: int, heads: int) -> bool:
    """Whether a bank of entries is done earlier this way than by VectorE; charges it to the engines that get it.

    `scalar` of the clock stands for the busier one of TensorE and ScalarE.
    """
    sums = BANK_FP32 // P * tokens * SHORTEST * FP32_PASSES * heads // P
    here = clock.scalar + max((BANK_FP32 + sums) * TENSOR_COST, BANK_FP32 * SCALAR_COST)
    there = clock.vector + 2 * BANK_FP32 * tokens * heads // P * VECTOR_COST
    if here < there:
        clock.scalar = here
        return True
    clock.vector = there
    return False


def summed_by_tensor(pool: TilePool, keys: nl.ndarray, queries: Queries, column: nl.ndarray) -> nl.ndarray:
    """fp32 [entries of a tile, tiles, tokens]: the scores of keys bf16 [128, entries of a span] in SBUF."""
    _, tokens, heads = queries.weights.shape
    rows = min(P, keys.shape[1])
    tiles = keys.shape[1] // rows
    sums = psum_sums(pool, (rows, tiles, tokens))
    for first in range(0, tiles, BANK_FP32 // P):
        count = min(BANK_FP32 // P, tiles - first)
        bank = psum_tile(pool, (tokens * heads, count * rows), nl.float32)
        nisa.nc_matmul(
            dst=bank,
            stationary=queries.moving,
            moving=keys[:, first * rows : (first + count) * rows],
            accumulate=False,
        )
        positive = sbuf_tile(pool, "positive", (tokens * heads, count * rows), nl.float32)
        nisa.activation(dst=positive, op=nl.relu, data=bank)
        for index in range(count):
            for token in range(tokens):
                start = token * heads
                nisa.nc_matmul(
                    dst=sums[:, first + index, token : token + 1],
                    stationary=positive[start : start + heads, index * rows : (index + 1) * rows],
                    moving=column[start : start + heads, :],
                    accumulate=False,
                    tile_position=(start, 0),
                    tile_size=(heads, P),
                )
    columns = sbuf_tile(pool, "columns", (rows, tiles, tokens), nl.float32)
    nisa.tensor_copy(dst=columns, src=sums)
    return columns

"""x times an e4m3 weight in the kernel layout with 32 x 32 block scales: codes are TensorE's operands as they lie."""

import nki.isa as nisa
import nki.language as nl

from .constants import FP8_BLOCK
from .engine_balance import SHORTEST, vector_is_free_first
from .kmajor import (
    MAX_COLUMNS,
    band_stacks,
    column_spans,
    load_codes,
    load_pairs,
    load_span_scales,
    my_bands,
    planes_of,
    result_tiles,
    row_parts,
    store_stack,
    times_each,
)
from .records import Band, ColumnSpan, EngineClock, RowPart, my_share
from .tile_pool import BANK_FP32, P, TilePool, new_pool, psum_tile, sbuf_tile
from .tiles import check_sizes

SCALED_X_M_MAX = 32
"""Rows of x up to which scaling x for each row block costs less than dequantizing the weights."""


def linear_fp8_kmajor(out: nl.ndarray, x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray, round_trip: bool) -> None:
    """x bf16 [m, k], w uint8 [n, k] in the kernel layout, scale uint8 [n / 32, k / 32] -> out bf16 [m, n] in HBM.

    A partition holds columns of one block, whose scale is then one number a partition. For few rows, x is multiplied by
    the scales, once for each row block, and codes are multiplied as they are; beyond, weights are dequantized to
    bf16. Both products are exact, and all of k is summed in PSUM.
    """
    m, k = x.shape
    n = w.shape[0]
    check_sizes(m, n, k)
    share = my_share(n)
    clock = EngineClock(0, 0)
    pool = new_pool()
    spans = column_spans(k, MAX_COLUMNS)
    pairs = load_pairs(pool, x, spans, round_trip, clock)
    scales = load_span_scales(pool, scale, share, spans)
    for stack in band_stacks(my_bands(n, share), m):
        results = result_tiles(pool, stack, m)
        for index in range(stack.count):
            band = Band(stack.first + index * stack.rows, stack.rows)
            block = (band.first - share.first) // FP8_BLOCK
            factors = []
            for tile in scales:
                factors.append(tile[:, :, block : block + band.rows // FP8_BLOCK])
            sums = []
            for tile in results:
                sums.append(tile[:, index, :, 0, :])
            if m <= SCALED_X_M_MAX:
                _scaled_x(pool, sums, w, band, spans, pairs, factors, clock)
            else:
                _dequantized(pool, sums, w, band, spans, pairs, factors, clock)
        store_stack(pool, out, stack, results)


def _scaled_x(
    pool: TilePool,
    results: list[nl.ndarray],
    w: nl.ndarray,
    band: Band,
    spans: list[ColumnSpan],
    pairs: list[nl.ndarray],
    scales: list[nl.ndarray],
    clock: EngineClock,
) -> None:
    """One band for few rows of x: a matmul takes x scaled for each of its row blocks, and only those parts are kept.

    results: for each row part fp32 [partitions, runs, m] in SBUF.
    """
    m = pairs[0].shape[2]
    tiles = []
    scaled = []
    for s in range(len(spans)):
        codes = load_codes(pool, w, band, spans[s], 1).view(nl.float8_e4m3)
        for tile in range(spans[s].tiles):
            tiles.append(codes[:, tile])
            scaled.append(_scale_x(pool, spans[s], tile, pairs[s], scales[s], clock))
    parts = row_parts(band.rows)
    for number in range(len(parts)):
        part = parts[number]
        blocks = part.partitions // FP8_BLOCK
        sums = psum_tile(pool, (part.partitions, part.runs, blocks, m), nl.float32)
        for run in range(part.runs):
            first = part.first + run * P
            block = first // FP8_BLOCK
            for t in range(len(tiles)):
                for column in range(tiles[t].shape[1]):
                    nisa.nc_matmul(
                        dst=sums[:, run],
                        stationary=tiles[t][:, column, first : first + part.partitions],
                        moving=scaled[t][:, block : block + blocks, column // 2, :, column % 2],
                        accumulate=t + column > 0,
                    )
        for block in range(blocks):
            lanes = nl.ds(block * FP8_BLOCK, FP8_BLOCK)
            elements = max(SHORTEST, part.runs * m)
            first_free = vector_is_free_first(clock, elements, elements)
            nisa.tensor_copy(
                dst=results[number][lanes],
                src=sums[lanes, :, block, :],
                engine=nisa.engine.vector if first_free else nisa.engine.scalar,
            )


def _scale_x(
    pool: TilePool, span: ColumnSpan, tile: int, pairs: nl.ndarray, scales: nl.ndarray, clock: EngineClock
) -> nl.ndarray:
    """x of one k tile times the scale of each row block: bf16 [partitions, row blocks, columns / 2, m, 2], exact."""
    partitions, _, m = pairs.shape
    halves = span.columns // 2
    factors = scales[:, tile]
    blocks = factors.shape[1]
    name = f"{tile} from column {span.first}"
    scaled = sbuf_tile(pool, f"scaled x of tile {name}", (partitions, blocks, halves, m, 2), nl.bfloat16)
    narrow = sbuf_tile(pool, f"bf16 scales of tile {name}", factors.shape, nl.bfloat16)
    x = planes_of(pairs[:, tile * halves : (tile + 1) * halves])
    size = 2 * halves * m
    times_each(scaled.reshape((partitions, blocks, size)), x.reshape((partitions, size)), factors, narrow, clock)
    return scaled


def _dequantized(
    pool: TilePool,
    results: list[nl.ndarray],
    w: nl.ndarray,
    band: Band,
    spans: list[ColumnSpan],
    pairs: list[nl.ndarray],
    scales: list[nl.ndarray],
    clock: EngineClock,
) -> None:
    """One band for many rows of x: weights are dequantized a tile of rows at a time. For results see _scaled_x."""
    m = pairs[0].shape[2]
    parts = row_parts(band.rows)
    sums = []
    for part in parts:
        # A bank holds a tile of rows, or several if they fit without one of them lying in two banks.
        room = BANK_FP32 // min(part.runs, max(1, BANK_FP32 // m))
        tile = nl.ndarray((part.partitions, part.runs, room), dtype=nl.float32, buffer=nl.psum)
        sums.append(tile[:, :, 0:m])
    for s in range(len(spans)):
        codes = load_codes(pool, w, band, spans[s], 1).view(nl.float8_e4m3)
        halves = spans[s].columns // 2
        x = planes_of(pairs[s])
        for tile in range(spans[s].tiles):
            for number in range(len(parts)):
                part = parts[number]
                for run in range(part.runs):
                    weights = _dequantize(pool, codes[:, tile], part, run, scales[s][:, tile], clock)
                    for column in range(spans[s].columns):
                        nisa.nc_matmul(
                            dst=sums[number][:, run],
                            stationary=weights[:, column],
                            moving=x[:, tile * halves + column // 2, :, column % 2],
                            accumulate=s + tile + column > 0,
                        )
    for number in range(len(parts)):
        elements = max(SHORTEST, parts[number].runs * m)
        first_free = vector_is_free_first(clock, elements, elements)
        nisa.tensor_copy(
            dst=results[number],
            src=sums[number],
            engine=nisa.engine.vector if first_free else nisa.engine.scalar,
        )


def _dequantize(
    pool: TilePool, codes: nl.ndarray, part: RowPart, run: int, scales: nl.ndarray, clock: EngineClock
) -> nl.ndarray:
    """A tile of rows of codes [partitions, columns, rows] times its scales: bf16 [partitions, columns, rows], exact."""
    partitions, columns, _ = codes.shape
    first = part.first + run * P
    weights = sbuf_tile(pool, "weights", (partitions, columns, part.partitions), nl.bfloat16)
    for block in range(part.partitions // FP8_BLOCK):
        rows = nl.ds(block * FP8_BLOCK, FP8_BLOCK)
        start = first + block * FP8_BLOCK
        factor = start // FP8_BLOCK
        cycles = max(SHORTEST, columns * FP8_BLOCK)
        first_free = vector_is_free_first(clock, cycles, cycles)
        nisa.tensor_scalar(
            dst=weights[:, :, rows],
            data=codes[:, :, start : start + FP8_BLOCK],
            op0=nl.multiply,
            operand0=scales[:, factor : factor + 1],
            engine=nisa.engine.vector if first_free else nisa.engine.scalar,
        )
    return weights

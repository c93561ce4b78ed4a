"""x times a packed e2m1 weight in the kernel layout with one e8m0 scale a row and 32 columns."""

import nki.isa as nisa
import nki.language as nl

from .constants import FP8_BLOCK
from .engine_balance import SHORTEST, charge_scalar, charge_vector, vector_is_free_first
from .kmajor import (
    MAX_COLUMNS,
    band_stacks,
    column_spans,
    load_codes,
    load_pairs,
    my_bands,
    planes_of,
    result_tiles,
    row_parts,
    store_stack,
)
from .kmajor_partial import multiply_spans, partial_columns, spread_pairs
from .records import Band, ColumnSpan, EngineClock, RowPart, my_share
from .scales import load_e8m0
from .tile_pool import P, TilePool, new_pool, psum_tile, sbuf_tile
from .tiles import check_sizes

PACKED = 2
"""Codes in a byte: columns 2j and 2j + 1, both on the byte's partition."""

LOW_UNIT = 2.0**14
HIGH_UNIT = 2.0**6
"""What 1.0 of an unpacked value stands for: low nibbles become e5m2 numbers, high ones e4m3 numbers."""

LOW_CODE = 0x8E8E8E8E - (1 << 32)
HIGH_MAGNITUDE = 0x1C1C1C1C
HIGH_SIGN = 0x80808080 - (1 << 32)
HIGH_CODE = 0x9C9C9C9C - (1 << 32)
"""Bits of each byte of a 32-bit word: where sign and magnitude lie once they have been shifted."""

ROUND_DOWN = -0.25
"""What makes rounding to nearest round half an integer down."""

SPREAD_M_MAX = 24
"""Rows of x up to which scaling partial sums costs less than scaling the weights."""

SPREAD_COLUMNS = 16
"""Columns a partition at most when partial sums are scaled: more need no fewer instructions."""

PIECE_BYTES = 2048
"""Bytes a partition that are unpacked together."""


def linear_fp4_kmajor(out: nl.ndarray, x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray, round_trip: bool) -> None:
    """out bf16 [m, n] in HBM = x bf16 [m, k] times w^T, w uint8 [n, k / 2] in the kernel layout, scale [n, k / 32].

    With `round_trip`, x first goes through e4m3 and back in blocks of 32 columns. For few rows of x, each block's
    partial sums are scaled in fp32; beyond, the weights are, exactly in bf16.
    """
    m, k = x.shape
    n = w.shape[0]
    check_sizes(m, n, k)
    share = my_share(n)
    clock = EngineClock(0, 0)
    pool = new_pool()
    few = m <= SPREAD_M_MAX
    spans = column_spans(k, partial_columns(m, FP8_BLOCK, SPREAD_COLUMNS) if few else MAX_COLUMNS)
    moving = load_pairs(pool, x, spans, round_trip, clock)
    if few:
        _equal_units(moving)
        moving = spread_pairs(moving, spans, FP8_BLOCK, HIGH_UNIT, clock)
    down = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=down, value=ROUND_DOWN)
    for stack in band_stacks(my_bands(n, share), m):
        results = result_tiles(pool, stack, m)
        for index in range(stack.count):
            band = Band(stack.first + index * stack.rows, stack.rows)
            sums = []
            for tile in results:
                sums.append(tile[:, index, :, 0, :])
            if few:
                _partial_sums(pool, sums, w, scale, band, spans, moving, down, clock)
            else:
                _dequantized(pool, sums, w, scale, band, spans, moving, down, clock)
        store_stack(pool, out, stack, results)


def _equal_units(pairs: list[nl.ndarray]) -> None:
    """Multiply the columns that meet low nibbles, so that both nibbles' values stand for HIGH_UNIT."""
    for tile in pairs:
        low = planes_of(tile)[:, :, :, 0]
        nisa.tensor_scalar(dst=low, data=low, op0=nl.multiply, operand0=LOW_UNIT / HIGH_UNIT)


def _load_scales(pool: TilePool, scale: nl.ndarray, first: int, part: RowPart) -> nl.ndarray:
    """The scales of rows first ...: fp32 [partitions, runs, k / 32] in SBUF, a weight row a partition."""
    rows = scale[first : first + part.runs * part.partitions, :].reshape_dim(0, (part.runs, part.partitions))
    return load_e8m0(pool, rows.permute((1, 0, 2)), (part.partitions, part.runs, scale.shape[1]))


def _partial_sums(
    pool: TilePool,
    results: list[nl.ndarray],
    w: nl.ndarray,
    scale: nl.ndarray,
    band: Band,
    spans: list[ColumnSpan],
    spread: list[nl.ndarray],
    down: nl.ndarray,
    clock: EngineClock,
) -> None:
    """One band for few rows of x. results: for each row part fp32 [partitions, runs, m] in SBUF."""
    nibbles = []
    for span in spans:
        nibbles.append(_unpack_span(pool, w, band, span, down, clock))
    parts = row_parts(band.rows)
    for number in range(len(parts)):
        part = parts[number]
        scales = _load_scales(pool, scale, band.first + part.first, part)
        charge_vector(clock, part.runs * scale.shape[1])
        charge_scalar(clock, part.runs * scale.shape[1])
        for run in range(part.runs):
            rows = nl.ds(part.first + run * P, part.partitions)
            stationaries = []
            for planes in nibbles:
                stationaries.append([planes[0][:, :, :, rows], planes[1][:, :, :, rows]])
            multiply_spans(pool, results[number][:, run], stationaries, scales[:, run], spread, clock)


def _unpack_span(
    pool: TilePool, w: nl.ndarray, band: Band, span: ColumnSpan, down: nl.ndarray, clock: EngineClock
) -> list[nl.ndarray]:
    """Both nibbles of a span: e5m2 and e4m3 [partitions, tiles, columns / 2, rows]."""
    codes = load_codes(pool, w, band, span, PACKED)
    low = sbuf_tile(pool, f"low from column {span.first}", codes.shape, nl.uint8)
    high = sbuf_tile(pool, f"high from column {span.first}", codes.shape, nl.uint8)
    signs = sbuf_tile(pool, f"signs from column {span.first}", codes.shape, nl.uint8)
    step = max(1, PIECE_BYTES // (codes.shape[2] * codes.shape[3]))
    for first in range(0, span.tiles, step):
        piece = nl.ds(first, min(step, span.tiles - first))
        _unpack(low[:, piece], high[:, piece], signs[:, piece], codes[:, piece], down, clock)
    return [low.view(nl.float8_e5m2), high.view(nl.float8_e4m3)]


def _unpack(
    low: nl.ndarray, high: nl.ndarray, signs: nl.ndarray, codes: nl.ndarray, down: nl.ndarray, clock: EngineClock
) -> None:
    """low, high = the nibbles of codes as e5m2 and e4m3 codes, four bytes a word; signs is scratch. All uint8.

    A byte is `t s bbb aaa`, signs before magnitudes. The low nibble `s aaa` is shifted up and masked. For the high one,
    ScalarE halves the signed byte, rounding down, which leaves its sign in place, and VectorE masks; or VectorE shifts
    the magnitude alone and puts the sign before it, whichever engine is free first.
    """
    words = codes.view(nl.int32)
    result = high.view(nl.int32)
    size = 1
    for dimension in range(1, len(words.shape)):
        size *= words.shape[dimension]
    nisa.tensor_scalar(
        dst=low.view(nl.int32), data=words, op0=nl.left_shift, operand0=1, op1=nl.bitwise_and, operand1=LOW_CODE
    )
    charge_vector(clock, size)
    if vector_is_free_first(clock, max(SHORTEST, 4 * size), max(SHORTEST, 4 * size)):
        sign = signs.view(nl.int32)
        nisa.tensor_scalar(
            dst=result, data=words, op0=nl.right_shift, operand0=1, op1=nl.bitwise_and, operand1=HIGH_MAGNITUDE
        )
        nisa.tensor_scalar(dst=sign, data=words, op0=nl.bitwise_and, operand0=HIGH_SIGN)
        nisa.tensor_tensor(dst=result, data1=result, data2=sign, op=nl.bitwise_or)
    else:
        offset = down[0 : codes.shape[0], :]
        nisa.activation(dst=high.view(nl.int8), op=nl.copy, data=codes.view(nl.int8), scale=0.5, bias=offset)
        nisa.tensor_scalar(dst=result, data=result, op0=nl.bitwise_and, operand0=HIGH_CODE)
        charge_vector(clock, size)


def _dequantized(
    pool: TilePool,
    results: list[nl.ndarray],
    w: nl.ndarray,
    scale: nl.ndarray,
    band: Band,
    spans: list[ColumnSpan],
    pairs: list[nl.ndarray],
    down: nl.ndarray,
    clock: EngineClock,
) -> None:
    """One band for many rows of x: a tile of rows is unpacked and scaled, then multiplied over all of k."""
    m = pairs[0].shape[2]
    codes = []
    for span in spans:
        codes.append(load_codes(pool, w, band, span, PACKED))
    parts = row_parts(band.rows)
    for number in range(len(parts)):
        part = parts[number]
        scales = _load_scales(pool, scale, band.first + part.first, part)
        for run in range(part.runs):
            rows = nl.ds(part.first + run * P, part.partitions)
            weights = []
            moving = []
            for s in range(len(spans)):
                halves = spans[s].columns // 2
                for tile in range(spans[s].tiles):
                    packed = codes[s][:, tile, :, rows]
                    weights.append(_dequantize(pool, packed, scales[:, run], spans[s], tile, down, clock))
                    moving.append(planes_of(pairs[s][:, tile * halves : (tile + 1) * halves]))
            sums = psum_tile(pool, (part.partitions, m), nl.float32)
            for t in range(len(weights)):
                for c in range(2 * weights[t].shape[1]):
                    nisa.nc_matmul(
                        dst=sums,
                        stationary=weights[t][:, c // 2, c % 2, :],
                        moving=moving[t][:, c // 2, :, c % 2],
                        accumulate=t + c > 0,
                    )
            nisa.activation(dst=results[number][:, run], op=nl.copy, data=sums, scale=HIGH_UNIT)
            charge_scalar(clock, m)


def _dequantize(
    pool: TilePool,
    codes: nl.ndarray,
    scales: nl.ndarray,
    span: ColumnSpan,
    tile: int,
    down: nl.ndarray,
    clock: EngineClock,
) -> nl.ndarray:
    """A tile of rows times its scales: bf16 [partitions, columns / 2, 2, rows], exact, value / HIGH_UNIT.

    codes uint8 [partitions, columns / 2, rows] of one k tile, scales fp32 [rows, k / 32]. The transposed scales stay in
    PSUM, where VectorE reads them at full rate.
    """
    partitions, halves, rows = codes.shape
    blocks = span.columns * partitions // FP8_BLOCK
    first = span.first // FP8_BLOCK + tile * blocks
    factors = psum_tile(pool, (partitions, rows), nl.float32)
    part = scales[:, first : first + blocks].expand_dim(2).broadcast(2, partitions // blocks)
    nisa.nc_transpose(dst=factors, data=part)
    low = sbuf_tile(pool, "low", codes.shape, nl.uint8)
    high = sbuf_tile(pool, "high", codes.shape, nl.uint8)
    signs = sbuf_tile(pool, "signs", codes.shape, nl.uint8)
    _unpack(low, high, signs, codes, down, clock)
    name = f"weights {tile} from column {span.first}"
    weights = sbuf_tile(pool, name, (partitions, halves, 2, rows), nl.bfloat16)
    by_pair = factors.expand_dim(1).broadcast(1, halves)
    nisa.scalar_tensor_tensor(
        dst=weights[:, :, 0],
        data=low.view(nl.float8_e5m2),
        op0=nl.multiply,
        operand0=LOW_UNIT / HIGH_UNIT,
        op1=nl.multiply,
        operand1=by_pair,
    )
    nisa.tensor_tensor(dst=weights[:, :, 1], data1=high.view(nl.float8_e4m3), data2=by_pair, op=nl.multiply)
    charge_vector(clock, 2 * halves * rows)
    return weights

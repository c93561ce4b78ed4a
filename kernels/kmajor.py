"""Building blocks of the GEMM kernels for the kernel layout, in which k lies on partitions and nothing is transposed.

`deepinfer_prep.kernel_layout` defines the layout: bands of at most 512 rows of w, each stored as [row bytes, rows].

Dimensions, beside those of tiles.py:
    columns     consecutive columns of k on one partition of a k tile, 2 to 32: all in one 32-column block, whose scale
                is then one number a partition
    span        k tiles of equal size that follow each other, which one DMA loads
    codes       a span of a band as it lies in memory: uint8 [partitions, tiles, columns / codes per byte, rows]
    pairs       x of a span, transposed: fp32 [partitions, tiles * columns / 2, m], each two bf16 values of one row
    stack       bands whose results share a transpose

Column `c` of a k tile is one stationary operand [partitions, 128 rows], contiguous in SBUF; what multiplies it is
plane c % 2 of pair c / 2 of the same tile.
"""

import nki.isa as nisa
import nki.language as nl

from .constants import BAND_ROWS, FP8_BLOCK, TWO_CORE_N_MULTIPLE
from .engine_balance import SHORTEST, charge_scalar, charge_vector, vector_is_free_first
from .load_x import ROUND_TRIP_PASSES, SCALE_PASSES, power_of_two_scales
from .records import Band, BandStack, ColumnSpan, EngineClock, RowPart, Share
from .scales import load_e8m0
from .tile_pool import BANK_FP32, P, TilePool, psum_tile, sbuf_tile
from .tiles import store_results

MAX_COLUMNS = FP8_BLOCK
"""Columns a partition at most: a block's."""

MIN_COLUMNS = 2
"""At least: the columns of an fp4 byte, and the bf16 values of a pair of x."""

COPY_SPEEDUP = 4
"""Elements a cycle of VectorE from bf16 to bf16 in SBUF."""


def my_bands(n: int, share: Share) -> list[Band]:
    """This program's bands of a weight of n rows; none belongs to two programs (see kernel_layout.bands)."""
    part = n // 2 if n % TWO_CORE_N_MULTIPLE == 0 else n
    found = []
    first = 0
    while first < n:
        rows = min(BAND_ROWS, first // part * part + part - first)
        if share.first <= first and first < share.end:
            found.append(Band(first, rows))
        first += rows
    return found


def band_stacks(bands: list[Band], m: int) -> list[BandStack]:
    """Bands whose results of m columns share a transpose: full ones that follow each other."""
    stacks = []
    index = 0
    while index < len(bands):
        band = bands[index]
        count = 1
        if band.rows == BAND_ROWS:
            while (
                count < P // m
                and index + count < len(bands)
                and bands[index + count].rows == BAND_ROWS
                and bands[index + count].first == band.first + count * BAND_ROWS
            ):
                count += 1
        stacks.append(BandStack(band.first, band.rows, count))
        index += count
    return stacks


def row_parts(rows: int) -> list[RowPart]:
    """A band's rows as tiles of 128, then what is left."""
    parts = []
    whole = rows // P
    if whole > 0:
        parts.append(RowPart(0, whole, P))
    if rows % P != 0:
        parts.append(RowPart(whole * P, 1, rows % P))
    return parts


def column_spans(k: int, most: int) -> list[ColumnSpan]:
    """k in spans of tiles with `most` columns a partition, then fewer as less is left; at last on 64 partitions."""
    spans = []
    first = 0
    columns = most
    while first < k:
        while columns > MIN_COLUMNS and k - first < columns * P:
            columns = columns // 2
        partitions = min(P, (k - first) // columns)
        tiles = (k - first) // (columns * partitions)
        spans.append(ColumnSpan(first, columns, partitions, tiles))
        first += columns * partitions * tiles
    return spans


def load_codes(pool: TilePool, w: nl.ndarray, band: Band, span: ColumnSpan, packed: int) -> nl.ndarray:
    """A span of a band: uint8 [partitions, tiles, columns / packed, rows] in SBUF.

    w uint8 [n, row bytes] in the kernel layout, `packed` codes a byte. A partition's bytes of a tile are one run in
    memory.
    """
    row_bytes = w.shape[1]
    size = span.columns // packed * band.rows
    tile = sbuf_tile(pool, f"codes from column {span.first}", (span.partitions, span.tiles, size), nl.uint8)
    start = band.first * row_bytes + span.first // packed * band.rows
    flat = w.reshape((w.shape[0] * row_bytes,))[start : start + span.tiles * span.partitions * size]
    nisa.dma_copy(dst=tile, src=flat.reshape((span.tiles, span.partitions, size)).permute((1, 0, 2)))
    return tile.reshape_dim(2, (span.columns // packed, band.rows))


def load_pairs(
    pool: TilePool, x: nl.ndarray, spans: list[ColumnSpan], round_trip: bool, clock: EngineClock
) -> list[nl.ndarray]:
    """x bf16 [m, k] in HBM, transposed: for each span fp32 pairs [partitions, tiles * columns / 2, m] in SBUF.

    With `round_trip`, x first goes through e4m3 and back in blocks of 32 columns.
    """
    m = x.shape[0]
    loaded = []
    for span in spans:
        loaded.append(nl.ndarray((span.partitions, span.tiles * span.columns // 2, m), nl.float32, buffer=nl.sbuf))
    for row in range(0, m, P):
        rows = min(P, m - row)
        parts = []
        for index in range(len(spans)):
            part = loaded[index][:, :, row : row + rows]
            _transpose_pairs(pool, part, x[row : row + rows, :], spans[index], clock)
            parts.append(planes_of(part))
        if round_trip:
            _round_trip(pool, parts, spans, x.shape[1], clock)
    return loaded


def planes_of(pairs: nl.ndarray) -> nl.ndarray:
    """fp32 pairs [partitions, pairs, m] as bf16 [partitions, pairs, m, 2]."""
    return pairs.view(nl.bfloat16).reshape_dim(2, (pairs.shape[2], 2))


def _transpose_pairs(pool: TilePool, dst: nl.ndarray, x: nl.ndarray, span: ColumnSpan, clock: EngineClock) -> None:
    """dst fp32 [partitions, pairs, rows] = the span's columns of x bf16 [rows, k] in HBM, pair by pair."""
    partitions, count, rows = dst.shape
    halves = span.columns // 2
    width = 2 * count * partitions
    tile = sbuf_tile(pool, "x", (rows, width), nl.bfloat16)
    nisa.dma_copy(dst=tile, src=x[:, span.first : span.first + width])
    source = tile.view(nl.float32).reshape((rows, span.tiles, partitions, halves))
    per_bank = min(count, BANK_FP32 // rows)
    for first in range(0, count, per_bank):
        size = min(per_bank, count - first)
        bank = psum_tile(pool, (partitions, size, rows), nl.float32)
        for index in range(size):
            pair = first + index
            nisa.nc_transpose(dst=bank[:, index, :], data=source[:, pair // halves, :, pair % halves])
        elements = max(SHORTEST, size * rows)
        first_free = vector_is_free_first(clock, elements, elements)
        nisa.tensor_copy(
            dst=dst[:, first : first + size, :],
            src=bank,
            engine=nisa.engine.vector if first_free else nisa.engine.scalar,
        )


def _round_trip(pool: TilePool, planes: list[nl.ndarray], spans: list[ColumnSpan], k: int, clock: EngineClock) -> None:
    """x, for each span bf16 [partitions, pairs, rows, 2], to e4m3 and back in place (see load_x.fp8_round_trip).

    A block of 32 columns lies on 32 / columns partitions: each finds its own maximum, and a transpose brings a block's
    together, so that all partitions work however few rows there are.
    """
    rows = planes[0].shape[2]
    amax = sbuf_tile(pool, "maxima", (rows, k // FP8_BLOCK), nl.float32)
    for index in range(len(spans)):
        first = spans[index].first // FP8_BLOCK
        blocks = span_blocks(spans[index])
        _block_maxima(pool, amax[:, first : first + blocks], planes[index], spans[index])
    scales = power_of_two_scales(pool, amax)
    charge_vector(clock, SCALE_PASSES * amax.shape[1])
    for index in range(len(spans)):
        _apply_round_trip(pool, planes[index], scales, spans[index])
        charge_vector(clock, ROUND_TRIP_PASSES * 2 * planes[index].shape[1] * rows)


def span_blocks(span: ColumnSpan) -> int:
    """Blocks of 32 columns in a span."""
    return span.tiles * span.columns * span.partitions // FP8_BLOCK


def _block_maxima(pool: TilePool, amax: nl.ndarray, x: nl.ndarray, span: ColumnSpan) -> None:
    """amax fp32 [rows, blocks] = the largest magnitudes of x bf16 [partitions, pairs, rows, 2]."""
    partitions, _, rows, _ = x.shape
    half = span.columns // 2
    shape = (partitions, span.tiles, half, 2 * rows)
    magnitude = sbuf_tile(pool, "magnitudes", shape, nl.bfloat16)
    nisa.activation(dst=magnitude.reshape(x.shape), op=nl.abs, data=x)
    while half > 1:
        half = half // 2
        low = magnitude[:, :, 0:half]
        nisa.tensor_tensor(dst=low, data1=low, data2=magnitude[:, :, half : 2 * half], op=nl.maximum)
    widest = sbuf_tile(pool, "partition maxima", (partitions, span.tiles, rows), nl.float32)
    first, second = magnitude[:, :, 0, 0 : 2 * rows : 2], magnitude[:, :, 0, 1 : 2 * rows : 2]
    nisa.tensor_tensor(dst=widest, data1=first, data2=second, op=nl.maximum)
    per_block = FP8_BLOCK // span.columns
    per_bank = BANK_FP32 // partitions
    for tile in range(0, span.tiles, per_bank):
        count = min(per_bank, span.tiles - tile)
        by_row = psum_tile(pool, (rows, count, partitions), nl.float32)
        for index in range(count):
            nisa.nc_transpose(dst=by_row[:, index, :], data=widest[:, tile + index, :])
        blocks = partitions // per_block
        part = amax[:, tile * blocks : (tile + count) * blocks]
        data = by_row.reshape((rows, count * blocks, per_block))
        nisa.tensor_reduce(dst=part, op=nl.maximum, data=data, axis=2)


def _apply_round_trip(pool: TilePool, x: nl.ndarray, scales: nl.ndarray, span: ColumnSpan) -> None:
    """x bf16 [partitions, pairs, rows, 2] divided by its blocks' scales, rounded to e4m3, and multiplied again.

    scales fp32 [rows, 2, blocks of k]: each block's and its inverse. Transposed they wait in PSUM, where VectorE reads
    them at full rate; tiles with one pair a partition share an instruction.
    """
    partitions, _, rows, _ = x.shape
    halves = span.columns // 2
    blocks = span.columns * partitions // FP8_BLOCK
    together = BANK_FP32 // rows if halves == 1 else 1
    codes = sbuf_tile(pool, "x codes", x.shape, nl.float8_e4m3)
    for tile in range(0, span.tiles, together):
        count = min(together, span.tiles - tile)
        factors = []
        for which in range(2):
            bank = psum_tile(pool, (partitions, count, rows), nl.float32)
            for index in range(count):
                first = span.first // FP8_BLOCK + (tile + index) * blocks
                part = scales[:, which, first : first + blocks]
                nisa.nc_transpose(dst=bank[:, index], data=part.expand_dim(2).broadcast(2, partitions // blocks))
            by_pair = bank if halves == 1 else bank.broadcast(1, halves)
            factors.append(by_pair.expand_dim(3).broadcast(3, 2))
        pairs = nl.ds(tile * halves, count * halves)
        nisa.tensor_tensor(dst=codes[:, pairs], data1=x[:, pairs], data2=factors[1], op=nl.multiply)
        nisa.tensor_tensor(dst=x[:, pairs], data1=codes[:, pairs], data2=factors[0], op=nl.multiply)


def times_each(dst: nl.ndarray, x: nl.ndarray, factors: nl.ndarray, narrow: nl.ndarray, clock: EngineClock) -> None:
    """dst bf16 [partitions, factors, size] = x bf16 [partitions, size] times each of fp32 [partitions, factors].

    For short x one instruction does all, with bf16 scratch `narrow` for the factors (powers of two or zero, which bf16
    holds); else one does each, at VectorE's fourfold rate or on ScalarE, whichever is free first.
    """
    size = x.shape[1]
    count = factors.shape[1]
    if size <= SHORTEST // 2:
        nisa.tensor_copy(dst=narrow, src=factors, engine=nisa.engine.scalar)
        wide = narrow.expand_dim(2).broadcast(2, size)
        nisa.tensor_tensor(dst=dst, data1=x.expand_dim(1).broadcast(1, count), data2=wide, op=nl.multiply)
        charge_scalar(clock, count)
        charge_vector(clock, count * size)
        return
    for index in range(count):
        first_free = vector_is_free_first(clock, max(SHORTEST, size // COPY_SPEEDUP), max(SHORTEST, size))
        nisa.tensor_scalar(
            dst=dst[:, index],
            data=x,
            op0=nl.multiply,
            operand0=factors[:, index : index + 1],
            engine=nisa.engine.vector if first_free else nisa.engine.scalar,
        )


def load_span_scales(pool: TilePool, scale: nl.ndarray, share: Share, spans: list[ColumnSpan]) -> list[nl.ndarray]:
    """Scales of 32 x 32 blocks of a program's rows: for each span fp32 [partitions, tiles, row blocks] in SBUF.

    scale uint8 [n / 32, k / 32]; every partition has the scale of the block that its columns of the tile lie in.
    """
    rows = share.size // FP8_BLOCK
    loaded = []
    for span in spans:
        loaded.append(nl.ndarray((span.partitions, span.tiles, rows), dtype=nl.float32, buffer=nl.sbuf))
    for start in range(0, rows, P):
        count = min(P, rows - start)
        row = share.first // FP8_BLOCK + start
        values = load_e8m0(pool, scale[row : row + count, :], (count, scale.shape[1]))
        for index in range(len(spans)):
            span = spans[index]
            blocks = span.columns * span.partitions // FP8_BLOCK
            for tile in range(span.tiles):
                first = span.first // FP8_BLOCK + tile * blocks
                data = values[:, first : first + blocks].expand_dim(2).broadcast(2, span.partitions // blocks)
                bank = psum_tile(pool, (span.partitions, count), nl.float32)
                nisa.nc_transpose(dst=bank, data=data)
                dst = loaded[index][:, tile, start : start + count]
                nisa.tensor_copy(dst=dst, src=bank, engine=nisa.engine.vector)
    return loaded


def result_tiles(pool: TilePool, stack: BandStack, m: int) -> list[nl.ndarray]:
    """Where the results of a stack are collected: for each row part fp32 [partitions, bands, runs, 1, m] in SBUF."""
    tiles = []
    for part in row_parts(stack.rows):
        shape = (part.partitions, stack.count, part.runs, 1, m)
        tiles.append(sbuf_tile(pool, "y", shape, nl.float32))
    return tiles


def store_stack(pool: TilePool, out: nl.ndarray, stack: BandStack, results: list[nl.ndarray]) -> None:
    """Store what result_tiles made, in out bf16 [m, n]."""
    parts = row_parts(stack.rows)
    for index in range(len(parts)):
        store_results(pool, out, stack.first + parts[index].first, results[index])

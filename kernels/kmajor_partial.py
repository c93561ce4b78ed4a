"""Scaling partial sums, for weights in the kernel layout whose scales no operand of a matmul can take up.

x is spread into a column for each scale block of a span, with zeros elsewhere, so that a matmul leaves the partial sums
of all blocks side by side; they are multiplied by the scales in fp32 and summed, as few_rows.py does.
"""

import nki.isa as nisa
import nki.language as nl

from .few_rows import block_mask, scale_partial, sum_blocks
from .kmajor import MIN_COLUMNS, planes_of, times_each
from .records import ColumnSpan, EngineClock
from .tile_pool import BANK_FP32, P, TilePool, psum_tile, sbuf_tile

FREE_COLUMNS = 64
"""Moving columns of a matmul that cost no more than one."""


def partial_columns(m: int, block: int, most: int) -> int:
    """Columns a partition for which the partial sums of a span's blocks of `block` columns are free on TensorE."""
    columns = most
    while columns > MIN_COLUMNS and columns * P // block * m > FREE_COLUMNS:
        columns = columns // 2
    return columns


def spread_pairs(
    pairs: list[nl.ndarray], spans: list[ColumnSpan], block: int, unit: float, clock: EngineClock
) -> list[nl.ndarray]:
    """x with a column for each scale block of a k tile: for each span bf16 [partitions, blocks, pairs, m, 2].

    `pairs` as load_pairs returns them. Column (block, row) of a pair holds `unit` (a power of two) times the row's
    values on the block's partitions and zeros elsewhere.
    """
    spread = []
    for index in range(len(spans)):
        partitions, count, m = pairs[index].shape
        columns = spans[index].columns
        blocks = columns * partitions // block
        mask = block_mask(columns * P // block, unit)[0:partitions, 0:blocks]
        narrow = nl.ndarray((partitions, blocks), dtype=nl.bfloat16, buffer=nl.sbuf)
        tile = nl.ndarray((partitions, blocks, count, m, 2), dtype=nl.bfloat16, buffer=nl.sbuf)
        size = 2 * count * m
        x = planes_of(pairs[index]).reshape((partitions, size))
        times_each(tile.reshape((partitions, blocks, size)), x, mask, narrow, clock)
        spread.append(tile)
    return spread


def multiply_spans(
    pool: TilePool,
    y: nl.ndarray,
    stationaries: list[list[nl.ndarray]],
    scales: nl.ndarray,
    spread: list[nl.ndarray],
    clock: EngineClock,
) -> None:
    """y fp32 [rows, m] in SBUF = the sum over blocks of scale times partial sum.

    stationaries: for each span the codes of each plane, [partitions, tiles, columns / 2, rows] each; scales fp32
    [rows, blocks of k]; spread as spread_pairs returns it.
    """
    rows, m = y.shape
    scaled = sbuf_tile(pool, "scaled", (rows, m, scales.shape[1]), nl.float32)
    column = 0
    for s in range(len(spread)):
        _, tiles, halves, _ = stationaries[s][0].shape
        blocks = spread[s].shape[1]
        per_bank = BANK_FP32 // (blocks * m)
        for first in range(0, tiles, per_bank):
            count = min(per_bank, tiles - first)
            partial = psum_tile(pool, (rows, count, m, blocks), nl.float32)
            for index in range(count):
                tile = first + index
                for c in range(2 * halves):
                    nisa.nc_matmul(
                        dst=partial[:, index],
                        stationary=stationaries[s][c % 2][:, tile, c // 2, :],
                        moving=spread[s][:, :, tile * halves + c // 2, :, c % 2].permute((0, 2, 1)),
                        accumulate=c > 0,
                    )
            scale_partial(scaled, partial, scales, column, clock)
            column += count * blocks
    sum_blocks(pool, y, scaled, clock)

"""e8m0 block scales on chip."""

import nki.isa as nisa
import nki.language as nl

from .constants import MANTISSA_BITS
from .records import KGroup
from .tile_pool import BANK_FP32, P, TilePool, psum_tile, sbuf_tile
from .tiles import k_groups, k_tiles

BLOCK = 32
"""Columns (and, for e4m3 weights, rows) that share a scale."""


def load_e8m0(pool: TilePool, src: nl.ndarray, shape: tuple[int, ...]) -> nl.ndarray:
    """e8m0 bytes in HBM as fp32 [*shape] in SBUF: 2^(b - 127) for byte b.

    Byte 0 gives 0.0: 2^-127 is a subnormal fp32 number, which engines may read as zero. Byte 255 (NaN) gives inf.
    """
    codes = sbuf_tile(pool, "scale codes", shape, nl.uint8)
    nisa.dma_copy(dst=codes, src=src)
    bits = sbuf_tile(pool, "scale bits", shape, nl.int32)
    nisa.tensor_copy(dst=bits, src=codes, engine=nisa.engine.scalar)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.left_shift, operand0=MANTISSA_BITS)
    return bits.view(nl.float32)


def load_row_scales(
    pool: TilePool, scale: nl.ndarray, row: int, per_partition: int, partitions: int, rows: int
) -> nl.ndarray:
    """The scales of weight rows, laid out like load_weights: fp32 [partitions, rows a partition, k / 32] in SBUF.

    `rows` weight rows share a row of scale. Where several lie on one partition they share it too: 1 row a partition.
    """
    columns = scale.shape[1]
    first = row // rows
    blocks = per_partition * partitions // rows
    part = scale[first : first + blocks, :]
    if rows == 1:
        src = part.reshape_dim(0, (partitions, per_partition))
        return load_e8m0(pool, src, (partitions, per_partition, columns))
    src = part.expand_dim(1).broadcast(1, rows // per_partition)
    return load_e8m0(pool, src, (partitions, 1, columns))


def load_block_scales(pool: TilePool, scale: nl.ndarray, first_row: int, rows: int, width: int) -> nl.ndarray:
    """Scales of 32 x 32 blocks as fp32 [128, k tiles, row blocks] in SBUF, transposed like the weights' k tiles.

    scale uint8 [n / 32, k / 32]; rows first_row ... of the weight. Partition p of a k tile holds the scale of column
    p * width / 128.
    """
    k = scale.shape[1] * BLOCK
    per_block = BLOCK * P // width
    st = nl.ndarray((P, k_tiles(k, width), rows // BLOCK), dtype=nl.float32, buffer=nl.sbuf)
    for start in range(0, rows // BLOCK, P):
        count = min(P, rows // BLOCK - start)
        block_row = first_row // BLOCK + start
        values = load_e8m0(pool, scale[block_row : block_row + count, :], (count, k // BLOCK))
        for group in k_groups(k, width, BANK_FP32 // count):
            _transpose_scales(pool, st, start, values, group, per_block)
    return st


def _transpose_scales(
    pool: TilePool, st: nl.ndarray, start: int, scales: nl.ndarray, group: KGroup, per_block: int
) -> None:
    """One group of k tiles: every column of `scales` repeated on the `per_block` partitions of its block."""
    count = scales.shape[0]
    bank = psum_tile(pool, (group.partitions, group.tiles, count), nl.float32)
    for index in range(group.tiles):
        column = (group.first + index) * P // per_block
        blocks = scales[:, column : column + group.partitions // per_block]
        nisa.nc_transpose(dst=bank[:, index, :], data=blocks.expand_dim(2).broadcast(2, per_block))
    nisa.tensor_copy(
        dst=st[0 : group.partitions, group.first : group.end, start : start + count],
        src=bank,
        engine=nisa.engine.vector,
    )

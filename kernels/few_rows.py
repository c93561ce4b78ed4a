"""GEMM for few rows of x: codes go to TensorE as they are, and each block's partial sums are scaled in fp32.

This spares the pass over the weights that dequantizing takes. x is spread into a column for each block, so that one
matmul leaves the partial sums of all blocks of a k tile side by side; as long as that makes at most 64 columns, TensorE
is no slower for it.
"""

import nki.isa as nisa
import nki.language as nl

from .engine_balance import SHORTEST, charge_scalar, charge_vector, vector_is_free_first
from .records import EngineClock
from .tile_pool import BANK_FP32, P, TilePool, psum_tile, sbuf_tile
from .tiles import TILES_PER_BANK, k_groups, k_tiles, transpose_weights

NARROW_M = 8
"""Rows of x whose bf16 values take 16 bytes: TensorE reads a moving operand at full rate in steps up to that."""

FEW_M = 24
"""Rows of x up to which any GEMM multiplies partial sums."""


def spread_blocks(moving: nl.ndarray, k: int, blocks: int, unit: float) -> nl.ndarray:
    """Activations with a column for each scale block of a k tile: bf16 [128, k tiles * halves, 2, blocks, m].

    moving is plane_view's result. Column (block, row) holds `unit` (a power of two) times the row's values on the
    block's partitions and zeros elsewhere. Where the step from block to block would be a wide one, a row's blocks lie
    side by side in memory.
    """
    _, tiles, halves, m, planes = moving.shape
    flat = moving.flatten_dims(1, 2).permute((0, 1, 3, 2))
    if NARROW_M < m <= FEW_M:
        by_row = nl.ndarray((P, tiles * halves, planes, m, blocks), dtype=nl.bfloat16, buffer=nl.sbuf)
        spread = by_row.permute((0, 1, 2, 4, 3))
    else:
        spread = nl.ndarray((P, tiles * halves, planes, blocks, m), dtype=nl.bfloat16, buffer=nl.sbuf)
    mask = block_mask(blocks, unit)
    for group in k_groups(k, P * halves * planes, tiles):
        first = group.first * halves
        end = group.end * halves
        partitions = group.partitions
        for block in range(blocks * partitions // P):
            nisa.tensor_scalar(
                dst=spread[0:partitions, first:end, :, block, :],
                data=flat[0:partitions, first:end, :, :],
                op0=nl.multiply,
                operand0=mask[0:partitions, block : block + 1],
                engine=nisa.engine.vector if block % 2 == 0 else nisa.engine.scalar,
            )
    return spread


def block_mask(blocks: int, unit: float) -> nl.ndarray:
    """fp32 [128, blocks]: `unit` where the partition belongs to the block, else 0.

    GpSimd keeps an element where an affine value of its place is not negative: the partition less the first of the
    block, and the last of the block less the partition.
    """
    size = P // blocks
    mask = nl.ndarray((P, blocks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=mask, value=unit)
    nisa.affine_select(
        dst=mask, pattern=[[-size, blocks]], channel_multiplier=1, on_true_tile=mask, on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )  # fmt: skip
    nisa.affine_select(
        dst=mask, pattern=[[size, blocks]], channel_multiplier=-1, on_true_tile=mask, on_false_value=0.0,
        cmp_op=nl.greater_equal, offset=size - 1,
    )  # fmt: skip
    return mask


def transpose_codes(pool: TilePool, tile: nl.ndarray, k: int, width: int, clock: EngineClock) -> nl.ndarray:
    """Byte pairs with k on partitions: bf16 [128, k tiles, rows a partition, row partitions] in SBUF.

    A k tile has `width` columns. The two bytes of a pair lie side by side; narrower types are views of them here, not
    in PSUM. VectorE copies two-byte elements out of PSUM at twice its rate.
    """
    rows, per_partition, _ = tile.shape
    pairs = sbuf_tile(pool, "pairs", (P, k_tiles(k, width), per_partition, rows), nl.bfloat16)
    for group in k_groups(k, width, TILES_PER_BANK // per_partition):
        bank = transpose_weights(pool, tile, group)
        elements = group.tiles * per_partition * rows
        first_free = vector_is_free_first(clock, max(SHORTEST, elements // 2), max(SHORTEST, elements))
        nisa.tensor_copy(
            dst=pairs[0 : group.partitions, group.first : group.end],
            src=bank,
            engine=nisa.engine.vector if first_free else nisa.engine.scalar,
        )
    return pairs


def multiply_partial(
    pool: TilePool,
    y: nl.ndarray,
    planes: list[nl.ndarray],
    scales: nl.ndarray,
    spread: nl.ndarray,
    k: int,
    clock: EngineClock,
) -> None:
    """y fp32 [rows, m] in SBUF = the sum over blocks of scale times partial sum.

    planes: the codes of each plane of a k tile, [128, k tiles, rows]; scales fp32 [rows, blocks of k]; spread as
    spread_blocks returns it.
    """
    rows, m = y.shape
    per_tile = spread.shape[3]
    halves = len(planes) // 2
    width = len(planes) * P
    scaled = sbuf_tile(pool, "scaled", (rows, m, scales.shape[1]), nl.float32)
    for group in k_groups(k, width, BANK_FP32 // (per_tile * m)):
        tiles = group.tiles
        partitions = group.partitions
        blocks = per_tile * partitions // P
        partial = psum_tile(pool, (rows, tiles, m, blocks), nl.float32)
        for index in range(tiles):
            tile = group.first + index
            for plane in range(len(planes)):
                nisa.nc_matmul(
                    dst=partial[:, index],
                    stationary=planes[plane][0:partitions, tile, :],
                    moving=spread[0:partitions, tile * halves + plane // 2, plane % 2, 0:blocks, :].permute((0, 2, 1)),
                    accumulate=plane > 0,
                )
        scale_partial(scaled, partial, scales, group.first * per_tile, clock)
    sum_blocks(pool, y, scaled, clock)


def scale_partial(scaled: nl.ndarray, partial: nl.ndarray, scales: nl.ndarray, first: int, clock: EngineClock) -> None:
    """scaled fp32 [rows, m, blocks of k] from block `first` on = partial sums times scales fp32 [rows, blocks of k].

    partial: fp32 [rows, tiles, m, blocks of a tile] in PSUM.
    """
    _, tiles, m, blocks = partial.shape
    columns = tiles * blocks
    factors = scales[:, first : first + columns].reshape_dim(1, (tiles, blocks))
    nisa.tensor_tensor(
        dst=scaled[:, :, first : first + columns].reshape_dim(2, (tiles, blocks)).permute((0, 2, 1, 3)),
        data1=partial,
        data2=factors.expand_dim(2).broadcast(2, m),
        op=nl.multiply,
    )
    charge_vector(clock, columns * m)


def sum_blocks(pool: TilePool, y: nl.ndarray, scaled: nl.ndarray, clock: EngineClock) -> None:
    """y fp32 [rows, m] = the sum of scaled fp32 [rows, m, blocks].

    VectorE sums all rows of x at once, ScalarE one an instruction, and then reads its accumulators. The two may add in
    another order, so the choice depends on the shape alone: one core and two must agree bit for bit.
    """
    rows, m, blocks = scaled.shape
    if blocks < SHORTEST:
        nisa.tensor_reduce(dst=y, op=nl.add, data=scaled, axis=2)
        charge_vector(clock, m * blocks)
        return
    unused = sbuf_tile(pool, "unused", (rows, blocks), nl.float32)
    for row in range(m):
        nisa.activation(
            dst=unused,
            op=nl.copy,
            data=scaled[:, row, :],
            reduce_op=nl.add,
            reduce_res=y[:, row : row + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        charge_scalar(clock, blocks + SHORTEST)

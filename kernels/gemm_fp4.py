"""x times a packed e2m1 weight with one e8m0 scale a row and 32 columns."""

import nki.isa as nisa
import nki.language as nl

from .activations import load_activations, spread_blocks
from .scales import BLOCK, load_e8m0
from .tiles import (
    BANK_FP32,
    TILES_PER_BANK,
    P,
    check_sizes,
    k_groups,
    k_tiles,
    load_weights,
    my_columns,
    plane_view,
    row_groups,
    store_results,
    transpose_weights,
)

HALVES = 2
WIDTH = 2 * HALVES * P
"""Columns of a k tile: partition p holds columns 4p ... 4p + 3, the low and high nibbles of two bytes."""

BLOCKS = WIDTH // BLOCK
"""Scale blocks in a k tile."""

PARTIAL_M_MAX = 16
"""Rows of x up to which scaling partial sums costs less than scaling the weights."""

CODE_UNIT = 64.0
"""What 1.0 of an e4m3 value stands for once an e2m1 code's bits sit in it: the biases differ by 2^6."""

MAGNITUDE = 0x1C1C1C1C
SIGN = 0x80808080 - (1 << 32)
SIGN_AND_MAGNITUDE = 0x9C9C9C9C - (1 << 32)
"""Where an e2m1 code's bits lie in each e4m3 byte of a 32-bit word."""


def linear(out: nl.ndarray, x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> None:
    """out bf16 [m, n] in HBM = x bf16 [m, k] times w^T, w uint8 [n, k / 2], scale uint8 [n, k / 32].

    A scale belongs to one row of w, so no operand of a matmul can absorb it for a whole k tile. Up to 16 rows of x,
    each block's partial sums are scaled in fp32; beyond, the weights are, exactly in bf16.
    """
    m, k = x.shape
    n = w.shape[0]
    check_sizes(m, n, k)
    share = my_columns(n)
    moving = plane_view(load_activations([x], WIDTH, False))
    if m <= PARTIAL_M_MAX:
        moving = spread_blocks(moving, k, BLOCKS)
    for group in row_groups(share[0], share[1], k // 2, m):
        row = group[0]
        per_partition = group[3]
        partitions = group[4]
        y = nl.ndarray((partitions, group[1], group[2], per_partition, m), dtype=nl.float32, buffer=nl.sbuf)
        for load in range(group[1] * group[2]):
            start = row + load * per_partition * partitions
            planes = _unpack(load_weights(w, start, per_partition, partitions), k)
            scales = _load_scales(scale, start, per_partition, partitions)
            for r in range(per_partition):
                target = y[:, load // group[2], load % group[2], r, :]
                rows = [planes[0][:, :, r, :], planes[1][:, :, r, :]]
                if m <= PARTIAL_M_MAX:
                    _multiply_partial(target, rows, scales[:, r, :], moving, k)
                else:
                    _multiply(target, _dequantize(rows, scales[:, r, :], k), moving, k)
        store_results(out, row, y)


def _load_scales(scale: nl.ndarray, row: int, per_partition: int, partitions: int) -> nl.ndarray:
    """Scales of the rows that load_weights took: fp32 [partitions, per_partition, k / 32]."""
    rows = scale[row : row + partitions * per_partition, :]
    shape = [partitions, per_partition, scale.shape[1]]
    return load_e8m0(rows.reshape_dim(0, (partitions, per_partition)), shape)


def _unpack(tile: nl.ndarray, k: int) -> list[nl.ndarray]:
    """Low and high nibbles as e4m3 [128, k tiles, rows a partition, 2 * row partitions], true value / 64.

    An e2m1 code s ee m becomes the e4m3 code s 00ee m00, four bytes a word. VectorE assembles the low nibbles. For the
    high ones ScalarE divides the signed byte by four, rounding down, which copies the sign into the two bits below it;
    one mask clears the rest.
    """
    rows, per_partition, _ = tile.shape
    tiles = k_tiles(k, WIDTH)
    low = nl.ndarray((P, tiles, per_partition, rows // 2), dtype=nl.int32, buffer=nl.sbuf)
    high = nl.ndarray((P, tiles, per_partition, 2 * rows), dtype=nl.int8, buffer=nl.sbuf)
    for group in k_groups(k, WIDTH, TILES_PER_BANK // per_partition):
        first = group[0]
        end = first + group[1]
        partitions = group[2]
        bank = transpose_weights(tile, group)
        _unpack_low(low[0:partitions, first:end], bank.view(nl.int32))
        _unpack_high(high[0:partitions, first:end], bank.view(nl.int8))
    return [low.view(nl.float8_e4m3), high.view(nl.float8_e4m3)]


def _unpack_low(dst: nl.ndarray, words: nl.ndarray) -> None:
    """dst = the low nibbles of words (in PSUM); the sign waits in PSUM, where the last step reads it at full rate."""
    sign = nl.ndarray(words.shape, dtype=nl.int32, buffer=nl.psum)
    nisa.tensor_scalar(dst=dst, data=words, op0=nl.left_shift, operand0=2, op1=nl.bitwise_and, operand1=MAGNITUDE)
    nisa.tensor_scalar(dst=sign, data=words, op0=nl.left_shift, operand0=4, op1=nl.bitwise_and, operand1=SIGN)
    nisa.tensor_tensor(dst=dst, data1=dst, data2=sign, op=nl.bitwise_or)


def _unpack_high(dst: nl.ndarray, signed_bytes: nl.ndarray) -> None:
    """dst int8 = the high nibbles; byte / 4 - 3/8 is never half-way, so rounding to nearest rounds byte / 4 down."""
    nisa.activation(dst=dst, op=nl.copy, data=signed_bytes, scale=0.25, bias=-0.375)
    words = dst.view(nl.int32)
    nisa.tensor_scalar(dst=words, data=words, op0=nl.bitwise_and, operand0=SIGN_AND_MAGNITUDE)


def _multiply_partial(y: nl.ndarray, rows: list[nl.ndarray], scales: nl.ndarray, spread: nl.ndarray, k: int) -> None:
    """y fp32 [row partitions, m] = 64 times the sum over blocks of scale times partial sum."""
    count, m = y.shape
    scaled = nl.ndarray((count, m, k // BLOCK), dtype=nl.float32, buffer=nl.sbuf)
    for group in k_groups(k, WIDTH, BANK_FP32 // (BLOCKS * m)):
        first = group[0]
        tiles = group[1]
        partitions = group[2]
        blocks = BLOCKS * partitions // P
        partial = nl.ndarray((count, tiles, blocks, m), dtype=nl.float32, buffer=nl.psum)
        for index in range(tiles):
            tile = first + index
            for plane in range(4):
                byte = plane // 2
                nisa.nc_matmul(
                    dst=partial[:, index],
                    stationary=rows[plane % 2][0:partitions, tile, byte : 2 * count : 2],
                    moving=spread[0:partitions, tile * HALVES + byte, plane % 2, 0:blocks, :],
                    accumulate=plane > 0,
                )
        column = first * BLOCKS
        columns = tiles * blocks
        nisa.tensor_tensor(
            dst=scaled[:, :, column : column + columns],
            data1=partial.reshape((count, columns, m)).permute((0, 2, 1)),
            data2=scales[:, column : column + columns].expand_dim(1).broadcast(1, m),
            op=nl.multiply,
        )
    _sum_blocks(y, scaled)


def _sum_blocks(y: nl.ndarray, scaled: nl.ndarray) -> None:
    """y fp32 [row partitions, m] = 64 times the sum of scaled fp32 [row partitions, m, blocks], on ScalarE."""
    count, m, blocks = scaled.shape
    unused = nl.ndarray((count, blocks), dtype=nl.float32, buffer=nl.sbuf)
    for row in range(m):
        nisa.activation(
            dst=unused,
            op=nl.copy,
            data=scaled[:, row, :],
            scale=CODE_UNIT,
            reduce_op=nl.add,
            reduce_res=y[:, row : row + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )


def _dequantize(rows: list[nl.ndarray], scales: nl.ndarray, k: int) -> nl.ndarray:
    """Unpacked codes times their scales: bf16 [128, k tiles, nibble, row partitions, 2], exact, true value / 64."""
    count = scales.shape[0]
    per_block = P // BLOCKS
    wt = nl.ndarray((P, k_tiles(k, WIDTH), 2, count, HALVES), dtype=nl.bfloat16, buffer=nl.sbuf)
    for group in k_groups(k, WIDTH, BANK_FP32 // count):
        first = group[0]
        tiles = group[1]
        partitions = group[2]
        bank = nl.ndarray((partitions, tiles, count), dtype=nl.float32, buffer=nl.psum)
        for index in range(tiles):
            column = (first + index) * BLOCKS
            blocks = scales[:, column : column + partitions // per_block]
            nisa.nc_transpose(dst=bank[:, index, :], data=blocks.expand_dim(2).broadcast(2, per_block))
        factors = bank.expand_dim(3).broadcast(3, HALVES)
        for nibble in range(2):
            nisa.tensor_tensor(
                dst=wt[0:partitions, first : first + tiles, nibble],
                data1=rows[nibble][0:partitions, first : first + tiles, :].reshape_dim(2, (count, HALVES)),
                data2=factors,
                op=nl.multiply,
            )
    return wt


def _multiply(y: nl.ndarray, wt: nl.ndarray, moving: nl.ndarray, k: int) -> None:
    """y fp32 [row partitions, m] = 64 times the dequantized rows times the activations, over all of k."""
    acc = nl.ndarray(y.shape, dtype=nl.float32, buffer=nl.psum)
    for tile in range(k_tiles(k, WIDTH)):
        partitions = min(P, (k - tile * WIDTH) * P // WIDTH)
        for plane in range(4):
            nisa.nc_matmul(
                dst=acc,
                stationary=wt[0:partitions, tile, plane % 2, :, plane // 2],
                moving=moving[0:partitions, tile, plane // 2, :, plane % 2],
                accumulate=tile + plane > 0,
            )
    nisa.activation(dst=y, op=nl.copy, data=acc, scale=CODE_UNIT)

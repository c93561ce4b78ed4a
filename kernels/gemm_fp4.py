"""x times a packed e2m1 weight with one e8m0 scale a row and 32 columns."""

import nki.isa as nisa
import nki.language as nl

from .engine_balance import charge_scalar, charge_vector, vector_is_free_first
from .few_rows import multiply_partial, spread_blocks, transpose_codes
from .load_x import load_activations, round_trip_cycles
from .records import EngineClock, my_share
from .scales import BLOCK, load_row_scales
from .tile_pool import BANK_FP32, P, TilePool, new_pool, psum_tile, sbuf_tile
from .tiles import TILES_PER_BANK, check_sizes, k_groups, k_tiles, load_weights, plane_view, row_groups, store_results

PLANES = 4
WIDTH = PLANES * P
"""Columns of a k tile: partition p holds columns 4p ... 4p + 3, the low and high nibbles of two bytes."""

BLOCKS = WIDTH // BLOCK
"""Scale blocks in a k tile."""

PARTIAL_M_MAX = 24
"""Rows of x up to which scaling partial sums costs less than scaling the weights."""

CODE_UNIT = 64.0
"""What 1.0 of an e4m3 value stands for once an e2m1 code's bits sit in it: the biases differ by 2^6."""

UPPER_NIBBLES = 0xF0F0F0F0 - (1 << 32)
MAGNITUDE = 0x1C1C1C1C
SIGN = 0x80808080 - (1 << 32)
SIGN_AND_MAGNITUDE = 0x9C9C9C9C - (1 << 32)
"""Bits of each byte of a 32-bit word: the upper nibble, and where an e2m1 code's bits lie in an e4m3 byte."""

ROUND_DOWN = -0.375
"""What makes rounding to nearest round a quarter of an integer down."""


def linear_fp4(out: nl.ndarray, x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray, round_trip: bool) -> None:
    """out bf16 [m, n] in HBM = x bf16 [m, k] times w^T, w uint8 [n, k / 2], scale uint8 [n, k / 32].

    With `round_trip`, x first goes through e4m3 and back in blocks of 32 columns.

    A scale belongs to one row of w, so no operand of a matmul can absorb it for a whole k tile. For few rows of x,
    each block's partial sums are scaled in fp32; beyond, the weights are, exactly in bf16.
    """
    m, k = x.shape
    n = w.shape[0]
    check_sizes(m, n, k)
    share = my_share(n)
    clock = EngineClock(0, 0)
    pool = new_pool()
    if round_trip:
        charge_vector(clock, round_trip_cycles(m, k, WIDTH))
    moving = plane_view(load_activations(pool, [x], WIDTH, round_trip))
    down = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=down, value=ROUND_DOWN)
    few = m <= PARTIAL_M_MAX
    if few:
        moving = spread_blocks(moving, k, BLOCKS, CODE_UNIT)
    for group in row_groups(share, k // 2, m):
        per_partition = group.per_partition
        partitions = group.partitions
        y = sbuf_tile(pool, "y", (partitions, group.stacks, group.runs, per_partition, m), nl.float32)
        for load in range(group.stacks * group.runs):
            row = group.first + load * group.rows_per_load
            planes = _unpack(pool, load_weights(pool, w, row, per_partition, partitions), k, down, clock)
            scales = load_row_scales(pool, scale, row, per_partition, partitions, 1)
            for r in range(per_partition):
                target = y[:, load // group.runs, load % group.runs, r, :]
                codes = []
                for plane in range(PLANES):
                    codes.append(planes[plane % 2][:, :, r, plane // 2 : 2 * partitions : 2])
                if few:
                    multiply_partial(pool, target, codes, scales[:, r, :], moving, k, clock)
                else:
                    _multiply(pool, target, _dequantize(pool, codes, scales[:, r, :], k), moving, k)
        store_results(pool, out, group.first, y)


def _unpack(pool: TilePool, tile: nl.ndarray, k: int, down: nl.ndarray, clock: EngineClock) -> list[nl.ndarray]:
    """Low and high nibbles as e4m3 [128, k tiles, rows a partition, 2 * row partitions], true value / 64.

    An e2m1 code s ee m becomes the e4m3 code s 00ee m00, four bytes a word. With the code in a byte's upper nibble,
    ScalarE divides the signed byte by four, rounding down, which copies the sign into the two bits below it; one mask
    clears the rest. Low nibbles are shifted up first, or assembled by VectorE, whichever engine is free first.
    """
    pairs = transpose_codes(pool, tile, k, WIDTH, clock)
    low = sbuf_tile(pool, "low", pairs.shape, nl.bfloat16)
    high = sbuf_tile(pool, "high", pairs.shape, nl.bfloat16)
    for group in k_groups(k, WIDTH, TILES_PER_BANK // pairs.shape[2]):
        part = nl.ds(0, group.partitions)
        tiles = nl.ds(group.first, group.tiles)
        elements = group.tiles * pairs.shape[2] * pairs.shape[3]
        _unpack_upper(high[part, tiles], pairs[part, tiles], down)
        charge_vector(clock, elements // 2)
        charge_scalar(clock, 2 * elements)
        if vector_is_free_first(clock, 2 * elements, 2 * elements):
            sign = sbuf_tile(pool, "signs", low[part, tiles].shape, nl.bfloat16)
            _unpack_low(low[part, tiles], sign, pairs[part, tiles])
        else:
            _shift_up(low[part, tiles], pairs[part, tiles])
            _unpack_upper(low[part, tiles], low[part, tiles], down)
            charge_vector(clock, elements)
    return [low.view(nl.float8_e4m3), high.view(nl.float8_e4m3)]


def _unpack_low(dst: nl.ndarray, sign: nl.ndarray, src: nl.ndarray) -> None:
    """dst = the low nibbles of src, assembled by VectorE alone; sign is scratch of dst's shape."""
    words = src.view(nl.int32)
    result = dst.view(nl.int32)
    signs = sign.view(nl.int32)
    nisa.tensor_scalar(dst=result, data=words, op0=nl.left_shift, operand0=2, op1=nl.bitwise_and, operand1=MAGNITUDE)
    nisa.tensor_scalar(dst=signs, data=words, op0=nl.left_shift, operand0=4, op1=nl.bitwise_and, operand1=SIGN)
    nisa.tensor_tensor(dst=result, data1=result, data2=signs, op=nl.bitwise_or)


def _shift_up(dst: nl.ndarray, src: nl.ndarray) -> None:
    """dst = the low nibbles of src as upper ones."""
    nisa.tensor_scalar(
        dst=dst.view(nl.int32),
        data=src.view(nl.int32),
        op0=nl.left_shift,
        operand0=4,
        op1=nl.bitwise_and,
        operand1=UPPER_NIBBLES,
    )


def _unpack_upper(dst: nl.ndarray, src: nl.ndarray, down: nl.ndarray) -> None:
    """dst = the upper nibbles of src; byte / 4 - 3/8 is never half-way, so rounding to nearest rounds byte / 4 down."""
    offset = down[0 : dst.shape[0], :]
    nisa.activation(dst=dst.view(nl.int8), op=nl.copy, data=src.view(nl.int8), scale=0.25, bias=offset)
    words = dst.view(nl.int32)
    nisa.tensor_scalar(dst=words, data=words, op0=nl.bitwise_and, operand0=SIGN_AND_MAGNITUDE)


def _dequantize(pool: TilePool, codes: list[nl.ndarray], scales: nl.ndarray, k: int) -> nl.ndarray:
    """Unpacked codes times their scales: bf16 [128, k tiles, 4, row partitions], exact, true value / 64.

    The transposed scales stay in PSUM, where VectorE reads them at full rate.
    """
    rows = scales.shape[0]
    per_block = P // BLOCKS
    wt = sbuf_tile(pool, "dequantized", (P, k_tiles(k, WIDTH), PLANES, rows), nl.bfloat16)
    for group in k_groups(k, WIDTH, BANK_FP32 // rows):
        first = group.first
        tiles = group.tiles
        partitions = group.partitions
        factors = psum_tile(pool, (partitions, tiles, rows), nl.float32)
        for index in range(tiles):
            column = (first + index) * BLOCKS
            blocks = scales[:, column : column + partitions // per_block]
            nisa.nc_transpose(dst=factors[:, index, :], data=blocks.expand_dim(2).broadcast(2, per_block))
        for plane in range(PLANES):
            nisa.tensor_tensor(
                dst=wt[0:partitions, first : first + tiles, plane, :],
                data1=codes[plane][0:partitions, first : first + tiles, :],
                data2=factors,
                op=nl.multiply,
            )
    return wt


def _multiply(pool: TilePool, y: nl.ndarray, wt: nl.ndarray, moving: nl.ndarray, k: int) -> None:
    """y fp32 [row partitions, m] = 64 times the dequantized rows times the activations, over all of k."""
    acc = psum_tile(pool, y.shape, nl.float32)
    for tile in range(k_tiles(k, WIDTH)):
        partitions = min(P, (k - tile * WIDTH) // PLANES)
        for plane in range(PLANES):
            nisa.nc_matmul(
                dst=acc,
                stationary=wt[0:partitions, tile, plane, :],
                moving=moving[0:partitions, tile, plane // 2, :, plane % 2],
                accumulate=tile + plane > 0,
            )
    nisa.activation(dst=y, op=nl.copy, data=acc, scale=CODE_UNIT)

"""x times an e4m3 weight with 128 x 128 blocks of float scales: partial sums of a block are scaled in fp32."""

import nki.isa as nisa
import nki.language as nl

from .engine_balance import charge_vector
from .few_rows import multiply_partial, spread_blocks, transpose_codes
from .load_x import load_activations
from .records import EngineClock, my_share
from .tile_pool import P, TilePool, new_pool, psum_tile, sbuf_tile
from .tiles import LOAD_BYTES, check_sizes, k_tiles, load_weights, plane_view, row_groups, store_results

PLANES = 2
WIDTH = PLANES * P
BLOCKS = 2
"""Scale blocks of 128 columns in a k tile."""

M_STEP = 256
"""Rows of x in one matmul: both blocks' partial sums then fill a PSUM bank."""

PARTIAL_M_MAX = 24
"""Rows of x up to which scaling all partial sums at once beats an instruction for each block."""


def linear_block128(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """x bf16 [m, k], w uint8 [n, k], scale fp32 [ceil(n / 128), k / 128] -> bf16 [m, n] in shared HBM.

    A float scale times a code does not fit bf16, so weights are never dequantized: partial sums are scaled in fp32.
    """
    m, k = x.shape
    n = w.shape[0]
    check_sizes(m, n, k)
    out = nl.ndarray((m, n), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_share(n)
    clock = EngineClock(0, 0)
    pool = new_pool()
    spread = spread_blocks(plane_view(load_activations(pool, [x], WIDTH, False)), k, BLOCKS, 1.0)
    scales = load_scales(scale, share.first, share.size)
    for group in row_groups(share, LOAD_BYTES, m):
        partitions = group.partitions
        y = sbuf_tile(pool, "y", (partitions, group.stacks, group.runs, 1, m), nl.float32)
        for load in range(group.stacks * group.runs):
            row = group.first + load * partitions
            weights = load_weights(pool, w, row, 1, partitions)
            codes = transpose_codes(pool, weights, k, WIDTH, clock).view(nl.float8_e4m3)
            planes = [codes[:, :, 0, 0 : 2 * partitions : 2], codes[:, :, 0, 1 : 2 * partitions : 2]]
            factors = scales[0:partitions, (row - share.first) // P, :]
            target = y[:, load // group.runs, load % group.runs, 0, :]
            if m <= PARTIAL_M_MAX:
                multiply_partial(pool, target, planes, factors, spread, k, clock)
            else:
                for first in range(0, m, M_STEP):
                    end = min(m, first + M_STEP)
                    _multiply(pool, target[:, first:end], planes, factors, spread[:, :, :, :, first:end], k, clock)
        store_results(pool, out, group.first, y)
    return out


def load_scales(scale: nl.ndarray, first_row: int, rows: int) -> nl.ndarray:
    """The scales of these weight rows on every partition: fp32 [128, row blocks, k / 128]."""
    first = first_row // P
    blocks = (rows + P - 1) // P
    tile = nl.ndarray((P, blocks, scale.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=scale[first : first + blocks, :].expand_dim(0).broadcast(0, P))
    return tile


def _multiply(
    pool: TilePool,
    acc: nl.ndarray,
    planes: list[nl.ndarray],
    scales: nl.ndarray,
    spread: nl.ndarray,
    k: int,
    clock: EngineClock,
) -> None:
    """acc fp32 [rows, m] = the sum over blocks of scale times partial sum, a block an instruction."""
    rows, m = acc.shape
    for tile in range(k_tiles(k, WIDTH)):
        blocks = min(BLOCKS, k // P - tile * BLOCKS)
        partitions = blocks * P // BLOCKS
        partial = psum_tile(pool, (rows, blocks, m), nl.float32)
        for plane in range(PLANES):
            nisa.nc_matmul(
                dst=partial,
                stationary=planes[plane][0:partitions, tile, :],
                moving=spread[0:partitions, tile, plane, 0:blocks, :],
                accumulate=plane > 0,
            )
        for block in range(blocks):
            column = tile * BLOCKS + block
            factor = scales[:, column : column + 1]
            charge_vector(clock, m)
            if column == 0:
                nisa.tensor_scalar(dst=acc, data=partial[:, block, :], op0=nl.multiply, operand0=factor)
            else:
                nisa.scalar_tensor_tensor(
                    dst=acc, data=partial[:, block, :], op0=nl.multiply, operand0=factor, op1=nl.add, operand1=acc
                )

"""x times an e4m3 weight with 32 x 32 block scales: dequantized exactly to bf16 on the way out of the transpose."""

import nki.isa as nisa
import nki.language as nl

from .engine_balance import charge_vector, vector_is_free_first
from .few_rows import multiply_partial, spread_blocks, transpose_codes
from .load_x import load_activations, round_trip_cycles
from .records import EngineClock, Share, my_share
from .scales import BLOCK, load_block_scales, load_row_scales
from .tile_pool import P, TilePool, new_pool, sbuf_tile
from .tiles import TILES_PER_BANK, check_sizes, k_groups, k_tiles, load_weights, plane_view, row_groups, store_results

PLANES = 2
WIDTH = PLANES * P
"""Columns of a k tile: partition p holds columns 2p and 2p + 1."""

SBUF_PASSES = 2
"""Cycles an element of VectorE with both inputs in SBUF."""

PARTIAL_M_MAX = 12
"""Rows of x up to which scaling partial sums costs less than dequantizing."""


def linear_fp8(out: nl.ndarray, x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray, round_trip: bool) -> None:
    """x bf16 [m, k], w uint8 [n, k], scale uint8 [n / 32, k / 32] -> out bf16 [m, n] in HBM.

    For few rows of x, partial sums are scaled. Beyond, weights are dequantized: a code times its power-of-two scale has
    four significant bits, so bf16 holds it exactly and all of k is summed in PSUM.
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
    if m <= PARTIAL_M_MAX:
        _few_rows(pool, out, moving, w, scale, share, clock)
    else:
        _many_rows(pool, out, moving, w, scale, share, clock)


def _few_rows(
    pool: TilePool,
    out: nl.ndarray,
    moving: nl.ndarray,
    w: nl.ndarray,
    scale: nl.ndarray,
    share: Share,
    clock: EngineClock,
) -> None:
    m = out.shape[0]
    k = w.shape[1]
    spread = spread_blocks(moving, k, WIDTH // BLOCK, 1.0)
    for group in row_groups(share, k, m):
        per_partition = group.per_partition
        partitions = group.partitions
        y = sbuf_tile(pool, "y", (partitions, group.stacks, group.runs, per_partition, m), nl.float32)
        for load in range(group.stacks * group.runs):
            row = group.first + load * group.rows_per_load
            weights = load_weights(pool, w, row, per_partition, partitions)
            codes = transpose_codes(pool, weights, k, WIDTH, clock).view(nl.float8_e4m3)
            factors = load_row_scales(pool, scale, row, per_partition, partitions, BLOCK)[:, 0, :]
            for r in range(per_partition):
                target = y[:, load // group.runs, load % group.runs, r, :]
                planes = [codes[:, :, r, 0 : 2 * partitions : 2], codes[:, :, r, 1 : 2 * partitions : 2]]
                multiply_partial(pool, target, planes, factors, spread, k, clock)
        store_results(pool, out, group.first, y)


def _many_rows(
    pool: TilePool,
    out: nl.ndarray,
    moving: nl.ndarray,
    w: nl.ndarray,
    scale: nl.ndarray,
    share: Share,
    clock: EngineClock,
) -> None:
    m = out.shape[0]
    k = w.shape[1]
    scales = load_block_scales(pool, scale, share.first, share.size, WIDTH)
    for group in row_groups(share, k, m):
        per_partition = group.per_partition
        partitions = group.partitions
        acc = nl.ndarray((partitions, group.stacks, group.runs, per_partition, m), dtype=nl.float32, buffer=nl.psum)
        for load in range(group.stacks * group.runs):
            row = group.first + load * group.rows_per_load
            first = (row - share.first) // BLOCK
            blocks = per_partition * partitions // BLOCK
            tile = load_weights(pool, w, row, per_partition, partitions)
            wt = _dequantize(pool, tile, scales[:, :, first : first + blocks], k, clock)
            for r in range(per_partition):
                _multiply(acc[:, load // group.runs, load % group.runs, r, :], wt, r, moving, k)
        y = sbuf_tile(pool, "y", acc.shape, nl.float32)
        nisa.tensor_copy(dst=y, src=acc, engine=nisa.engine.vector)
        charge_vector(clock, 2 * group.stacks * group.runs * per_partition * m)
        store_results(pool, out, group.first, y)


def _dequantize(pool: TilePool, tile: nl.ndarray, scales: nl.ndarray, k: int, clock: EngineClock) -> nl.ndarray:
    """bf16 [128, k tiles, rows a partition, row partitions, 2] in SBUF: transposed codes times scales, exact."""
    rows, per_partition, _ = tile.shape
    blocks = scales.shape[2]
    wt = sbuf_tile(pool, "dequantized", (P, k_tiles(k, WIDTH), per_partition, rows, PLANES), nl.bfloat16)
    transposed = transpose_codes(pool, tile, k, WIDTH, clock).view(nl.float8_e4m3)
    for group in k_groups(k, WIDTH, TILES_PER_BANK // per_partition):
        count = group.tiles
        partitions = group.partitions
        shape = (partitions, count, per_partition, blocks, PLANES * rows // blocks)
        codes = transposed[0:partitions, group.first : group.end].reshape(shape)
        dst = wt[0:partitions, group.first : group.end].reshape(codes.shape)
        factors = scales[0:partitions, group.first : group.end, :]
        cycles = count * per_partition * rows * PLANES
        if vector_is_free_first(clock, SBUF_PASSES * cycles, cycles):
            _scale_on_vector(dst, codes, factors)
        else:
            _scale_on_scalar(dst, codes, factors)
    return wt


def _scale_on_vector(dst: nl.ndarray, codes: nl.ndarray, scales: nl.ndarray) -> None:
    """codes [partitions, k tiles, rows a partition, blocks, run] times scales [partitions, k tiles, blocks]."""
    _, _, per_partition, _, run = codes.shape
    factors = scales.expand_dim(3).broadcast(3, run)
    for r in range(per_partition):
        nisa.tensor_tensor(dst=dst[:, :, r], data1=codes[:, :, r], data2=factors, op=nl.multiply)


def _scale_on_scalar(dst: nl.ndarray, codes: nl.ndarray, scales: nl.ndarray) -> None:
    """The same on ScalarE, whose scale operand is one number a partition: an instruction for each block."""
    _, tiles, _, blocks, _ = codes.shape
    for tile in range(tiles):
        for block in range(blocks):
            nisa.activation(
                dst=dst[:, tile, :, block, :],
                op=nl.copy,
                data=codes[:, tile, :, block, :],
                scale=scales[:, tile, block : block + 1],
            )


def _multiply(acc: nl.ndarray, wt: nl.ndarray, r: int, moving: nl.ndarray, k: int) -> None:
    """acc fp32 [row partitions, m] in PSUM = the r-th rows of wt times the activations, over all of k."""
    for tile in range(k_tiles(k, WIDTH)):
        partitions = min(P, (k - tile * WIDTH) // PLANES)
        for plane in range(PLANES):
            nisa.nc_matmul(
                dst=acc,
                stationary=wt[0:partitions, tile, r, :, plane],
                moving=moving[0:partitions, tile, 0, :, plane],
                accumulate=tile + plane > 0,
            )

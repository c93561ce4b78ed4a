"""x times an e4m3 weight with 128 x 128 blocks of float scales: partial sums of a block are scaled in fp32."""

import nki.isa as nisa
import nki.language as nl

from .activations import load_activations, spread_blocks
from .tiles import (
    LOAD_BYTES,
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

PLANES = 2
WIDTH = PLANES * P
BLOCKS = 2
"""Scale blocks of 128 columns in a k tile."""

M_STEP = 256
"""Rows of x in one matmul: both blocks' partial sums then fill a PSUM bank."""


def linear(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """x bf16 [m, k], w uint8 [n, k], scale fp32 [ceil(n / 128), k / 128] -> bf16 [m, n] in shared HBM.

    A float scale times a code does not fit bf16, so codes go to TensorE as they are and each block's partial sums are
    multiplied by its scale.
    """
    m, k = x.shape
    n = w.shape[0]
    check_sizes(m, n, k)
    out = nl.ndarray((m, n), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_columns(n)
    spread = spread_blocks(plane_view(load_activations([x], WIDTH, False)), k, BLOCKS)
    scales = _load_scales(scale, share[0], share[1])
    for group in row_groups(share[0], share[1], LOAD_BYTES, m):
        row = group[0]
        partitions = group[4]
        y = nl.ndarray((partitions, group[1], group[2], 1, m), dtype=nl.float32, buffer=nl.sbuf)
        for load in range(group[1] * group[2]):
            start = row + load * partitions
            codes = _transpose_codes(load_weights(w, start, 1, partitions), k)
            factors = scales[0:partitions, (start - share[0]) // P, :]
            target = y[:, load // group[2], load % group[2], 0, :]
            for first in range(0, m, M_STEP):
                end = min(m, first + M_STEP)
                _multiply(target[:, first:end], codes, factors, spread[:, :, :, :, first:end], k)
        store_results(out, row, y)
    return out


def _load_scales(scale: nl.ndarray, first_row: int, rows: int) -> nl.ndarray:
    """The scales of these weight rows on every partition: fp32 [128, row blocks, k / 128]."""
    first = first_row // P
    blocks = (rows + P - 1) // P
    tile = nl.ndarray((P, blocks, scale.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=scale[first : first + blocks, :].expand_dim(0).broadcast(0, P))
    return tile


def _transpose_codes(tile: nl.ndarray, k: int) -> nl.ndarray:
    """The codes with k on partitions: e4m3 [128, k tiles, 2 * row partitions] in SBUF, a pair's two side by side."""
    rows = tile.shape[0]
    pairs = nl.ndarray((P, k_tiles(k, WIDTH), 1, rows), dtype=nl.bfloat16, buffer=nl.sbuf)
    for group in k_groups(k, WIDTH, TILES_PER_BANK):
        first = group[0]
        count = group[1]
        nisa.tensor_copy(
            dst=pairs[0 : group[2], first : first + count],
            src=transpose_weights(tile, group),
            engine=nisa.engine.scalar,
        )
    return pairs.view(nl.float8_e4m3).squeeze_dim(2)


def _multiply(acc: nl.ndarray, codes: nl.ndarray, scales: nl.ndarray, moving: nl.ndarray, k: int) -> None:
    """acc fp32 [rows, m] = the sum over blocks of scale times partial sum."""
    rows, m = acc.shape
    for tile in range(k_tiles(k, WIDTH)):
        blocks = min(BLOCKS, k // P - tile * BLOCKS)
        partitions = blocks * P // BLOCKS
        partial = nl.ndarray((rows, blocks, m), dtype=nl.float32, buffer=nl.psum)
        for plane in range(PLANES):
            nisa.nc_matmul(
                dst=partial,
                stationary=codes[0:partitions, tile, plane : 2 * rows : PLANES],
                moving=moving[0:partitions, tile, plane, 0:blocks, :],
                accumulate=plane > 0,
            )
        for block in range(blocks):
            column = tile * BLOCKS + block
            factor = scales[:, column : column + 1]
            if column == 0:
                nisa.tensor_scalar(dst=acc, data=partial[:, block, :], op0=nl.multiply, operand0=factor)
            else:
                nisa.scalar_tensor_tensor(
                    dst=acc, data=partial[:, block, :], op0=nl.multiply, operand0=factor, op1=nl.add, operand1=acc
                )

"""x times an e4m3 weight with 32 x 32 block scales: dequantized exactly to bf16 on the way out of the transpose."""

import nki.isa as nisa
import nki.language as nl

from .activations import load_activations
from .scales import BLOCK, load_block_scales
from .tiles import (
    TILES_PER_BANK,
    P,
    check_sizes,
    k_groups,
    k_tiles,
    load_weights,
    my_columns,
    plane_view,
    row_groups,
    rows_per_partition,
    store_rows,
    transpose_weights,
)

PLANES = 2
WIDTH = PLANES * P
"""Columns of a k tile: partition p holds columns 2p and 2p + 1."""

VECTOR_BANKS = 4
BANK_CYCLE = 9
"""VectorE dequantizes 4 banks of 9 and ScalarE the others: the ratio of their clocks, 0.96 to 1.2 GHz."""


def linear(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray, round_trip: bool) -> nl.ndarray:
    """x bf16 [m, k], w uint8 [n, k], scale uint8 [n / 32, k / 32] -> bf16 [m, n] in shared HBM.

    A weight code times its power-of-two scale has four significant bits, so bf16 holds it exactly and all of k is
    summed in fp32 in PSUM.
    """
    m, k = x.shape
    n = w.shape[0]
    check_sizes(m, n, k)
    out = nl.ndarray((m, n), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_columns(n)
    moving = plane_view(load_activations(x, WIDTH, round_trip))
    scales = load_block_scales(scale, share[0], share[1], WIDTH)
    banks = 0
    for group in row_groups(share[0], share[1], rows_per_partition(k)):
        row = group[0]
        loads = group[1]
        per_partition = group[2]
        partitions = group[3]
        y = nl.ndarray((partitions, loads * per_partition, m), dtype=nl.bfloat16, buffer=nl.sbuf)
        for load in range(loads):
            start = row + load * per_partition * partitions
            tile = load_weights(w, start, per_partition, partitions)
            blocks = per_partition * partitions // BLOCK
            first = (start - share[0]) // BLOCK
            wt = _dequantize(tile, scales[:, :, first : first + blocks], k, banks)
            banks += len(k_groups(k, WIDTH, TILES_PER_BANK // per_partition))
            for r in range(per_partition):
                _multiply(y[:, load * per_partition + r, :], wt, r, moving, k)
        store_rows(out, row, y, loads, per_partition)
    return out


def _dequantize(tile: nl.ndarray, scales: nl.ndarray, k: int, first_bank: int) -> nl.ndarray:
    """bf16 [128, k tiles, rows a partition, row partitions, 2] in SBUF: transposed codes times scales, exact."""
    rows, per_partition, _ = tile.shape
    blocks = scales.shape[2]
    wt = nl.ndarray((P, k_tiles(k, WIDTH), per_partition, rows, PLANES), dtype=nl.bfloat16, buffer=nl.sbuf)
    bank_index = first_bank
    for group in k_groups(k, WIDTH, TILES_PER_BANK // per_partition):
        first = group[0]
        count = group[1]
        partitions = group[2]
        bank = transpose_weights(tile, group).view(nl.float8_e4m3)
        codes = bank.reshape((partitions, count, per_partition, blocks, PLANES * rows // blocks))
        dst = wt[0:partitions, first : first + count].reshape(codes.shape)
        factors = scales[0:partitions, first : first + count, :]
        if bank_index * VECTOR_BANKS % BANK_CYCLE < VECTOR_BANKS:
            _scale_on_vector(dst, codes, factors)
        else:
            _scale_on_scalar(dst, codes, factors)
        bank_index += 1
    return wt


def _scale_on_vector(dst: nl.ndarray, codes: nl.ndarray, scales: nl.ndarray) -> None:
    """codes [partitions, k tiles, rows a partition, blocks, run] times scales [partitions, k tiles, blocks]."""
    _, _, per_partition, _, run = codes.shape
    factors = scales.expand_dim(2).broadcast(2, per_partition).expand_dim(4).broadcast(4, run)
    nisa.tensor_tensor(dst=dst, data1=codes, data2=factors, op=nl.multiply)


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


def _multiply(y: nl.ndarray, wt: nl.ndarray, r: int, moving: nl.ndarray, k: int) -> None:
    """y bf16 [row partitions, m] = the r-th rows of wt times the activations, over all of k."""
    acc = nl.ndarray(y.shape, dtype=nl.float32, buffer=nl.psum)
    last = k_tiles(k, WIDTH) - 1
    for tile in range(last + 1):
        partitions = min(P, (k - tile * WIDTH) // PLANES)
        for plane in range(PLANES):
            nisa.nc_matmul(
                dst=acc,
                stationary=wt[0:partitions, tile, r, :, plane],
                moving=moving[0:partitions, tile, 0, :, plane],
                accumulate=tile + plane > 0,
            )
    nisa.tensor_copy(dst=y, src=acc, engine=nisa.engine.vector)

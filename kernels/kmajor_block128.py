"""x times an e4m3 weight in the kernel layout with float scales of 128 x 128 blocks: partial sums are scaled."""

import nki.isa as nisa
import nki.language as nl

from .constants import K_MULTIPLE
from .engine_balance import charge_vector
from .gemm_block128 import load_scales
from .kmajor import (
    MAX_COLUMNS,
    MIN_COLUMNS,
    band_stacks,
    column_spans,
    load_codes,
    load_pairs,
    my_bands,
    planes_of,
    result_tiles,
    row_parts,
    store_stack,
)
from .kmajor_partial import multiply_spans, partial_columns, spread_pairs
from .records import Band, EngineClock, my_share
from .tile_pool import P, TilePool, new_pool, psum_tile
from .tiles import check_sizes

SPREAD_M_MAX = 32
"""Rows of x up to which scaling all partial sums at once beats an instruction for each block."""


def linear_block128_kmajor(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """x bf16 [m, k], w uint8 [n, k] in the kernel layout, scale fp32 [ceil(n / 128), k / 128] -> bf16 [m, n].

    A float scale times a code does not fit bf16, so weights are never dequantized: partial sums are scaled in fp32.
    """
    m, k = x.shape
    n = w.shape[0]
    check_sizes(m, n, k)
    out = nl.ndarray((m, n), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_share(n)
    clock = EngineClock(0, 0)
    pool = new_pool()
    few = m <= SPREAD_M_MAX
    spans = column_spans(k, partial_columns(m, K_MULTIPLE, MAX_COLUMNS) if few else MIN_COLUMNS)
    moving = load_pairs(pool, x, spans, False, clock)
    if few:
        moving = spread_pairs(moving, spans, K_MULTIPLE, 1.0, clock)
    scales = load_scales(scale, share.first, share.size)
    for stack in band_stacks(my_bands(n, share), m):
        results = result_tiles(pool, stack, m)
        for index in range(stack.count):
            band = Band(stack.first + index * stack.rows, stack.rows)
            codes = []
            for span in spans:
                codes.append(load_codes(pool, w, band, span, 1).view(nl.float8_e4m3))
            parts = row_parts(band.rows)
            for number in range(len(parts)):
                part = parts[number]
                for run in range(part.runs):
                    first = part.first + run * P
                    stationaries = []
                    for tile in codes:
                        stationaries.append(_planes(tile[:, :, :, first : first + part.partitions]))
                    factors = scales[0 : part.partitions, (band.first - share.first + first) // P, :]
                    y = results[number][:, index, run, 0, :]
                    if few:
                        multiply_spans(pool, y, stationaries, factors, moving, clock)
                    else:
                        _multiply(pool, y, stationaries, factors, moving, clock)
        store_stack(pool, out, stack, results)
    return out


def _planes(codes: nl.ndarray) -> list[nl.ndarray]:
    """Codes [partitions, tiles, columns, rows] as even and odd columns."""
    columns = codes.shape[2]
    return [codes[:, :, 0:columns:2, :], codes[:, :, 1:columns:2, :]]


def _multiply(
    pool: TilePool,
    y: nl.ndarray,
    stationaries: list[list[nl.ndarray]],
    scales: nl.ndarray,
    pairs: list[nl.ndarray],
    clock: EngineClock,
) -> None:
    """y fp32 [rows, m] = the sum over blocks of scale times partial sum, a block an instruction.

    A block of 128 columns lies on 64 partitions, two columns on each. For stationaries see multiply_spans.
    """
    rows, m = y.shape
    half = P // MIN_COLUMNS
    column = 0
    for s in range(len(pairs)):
        x = planes_of(pairs[s])
        for tile in range(x.shape[1]):
            for block in range(x.shape[0] // half):
                lanes = nl.ds(block * half, half)
                partial = psum_tile(pool, (rows, m), nl.float32)
                for c in range(MIN_COLUMNS):
                    nisa.nc_matmul(
                        dst=partial,
                        stationary=stationaries[s][c][lanes, tile, 0, :],
                        moving=x[lanes, tile, :, c],
                        accumulate=c > 0,
                    )
                factor = scales[:, column : column + 1]
                charge_vector(clock, m)
                if column == 0:
                    nisa.tensor_scalar(dst=y, data=partial, op0=nl.multiply, operand0=factor)
                else:
                    nisa.scalar_tensor_tensor(
                        dst=y, data=partial, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=y
                    )
                column += 1

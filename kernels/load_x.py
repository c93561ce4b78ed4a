"""Activations of the GEMM kernels: loaded, optionally taken through the fp8 round trip, transposed."""

import nki.isa as nisa
import nki.language as nl

from .constants import AMAX_FLOOR, FP8_BLOCK, FP8_MAX
from .records import KSpan
from .tile_pool import P, TilePool, sbuf_tile
from .tiles import fold_factor, k_tiles, load_folded, transpose_folded

ROUND_TRIP_PASSES = 3
"""Times that VectorE reads every element of x in the round trip."""

SCALE_PASSES = 7
"""Cycles a block in power_of_two_scales: two of its five instructions read two operands in SBUF."""

FOLD_WIDTH = 256
"""Columns of a k tile of two planes, the narrowest that rows are folded to."""

EXPONENT_BITS = 0x7F800000
ONE_BITS = 0x3F800000
"""Of fp32: where the exponent lies, and 1.0."""

CHUNK = 2048
"""Columns that one step of the round trip takes: keeps its fp32 scales in one PSUM bank."""


def load_activations(pool: TilePool, sources: list[nl.ndarray], width: int, round_trip: bool) -> nl.ndarray:
    """bf16 [rows, k] matrices in HBM, stacked, as fp32 pairs [128, k tiles of `width` columns, width / 256, m].

    m counts the rows of all sources; of several there may be 128 in all. See transpose_folded for the pairs' order.
    """
    rows, k = sources[0].shape
    m = rows * len(sources)
    assert len(sources) == 1 or m <= P, f"{len(sources)} matrices of {rows} rows do not fit {P} partitions"
    xt = nl.ndarray((P, k_tiles(k, width), width // FOLD_WIDTH, m), dtype=nl.float32, buffer=nl.sbuf)
    for row in range(0, m, P):
        count = min(P, m - row)
        for span in _k_spans(k, width, count):
            folded = load_folded(pool, sources, row, count // len(sources), span.column, span.segments, span.width)
            if round_trip:
                fp8_round_trip(pool, folded)
            first = span.column // width
            tiles = k_tiles(span.width, width)
            dst = xt[0 : span.partitions, first : first + span.segments * tiles, :, row : row + count]
            transpose_folded(pool, dst.reshape_dim(1, (span.segments, tiles)), folded)
    return xt


def _k_spans(k: int, width: int, rows: int) -> list[KSpan]:
    """k as its whole k tiles, then the rest."""
    spans = []
    full = k // width
    if full > 0:
        segments = fold_factor(full, rows)
        spans.append(KSpan(0, segments, full // segments * width, P))
    if k % width != 0:
        spans.append(KSpan(full * width, 1, k % width, k % width * P // width))
    return spans


def round_trip_cycles(m: int, k: int, width: int) -> int:
    """Cycles of VectorE that the round trip takes in load_activations."""
    cycles = 0
    for row in range(0, m, P):
        for span in _k_spans(k, width, min(P, m - row)):
            cycles += ROUND_TRIP_PASSES * span.width
    return cycles


def fp8_round_trip(pool: TilePool, x: nl.ndarray) -> None:
    """x bf16 [rows, columns] in SBUF to e4m3 and back, in place, in blocks of 32 columns with power-of-two scales.

    The scale of a block is the smallest power of two s with max(|x|, AMAX_FLOOR) / s <= 224. Dividing by s and
    multiplying by it are exact, so the only rounding is that to e4m3, to nearest even.
    """
    rows, columns = x.shape
    for start in range(0, columns, CHUNK):
        size = min(CHUNK, columns - start)
        blocks = x[:, start : start + size].reshape_dim(1, (size // FP8_BLOCK, FP8_BLOCK))
        scales = power_of_two_scales(pool, _block_maxima(pool, blocks))
        codes = sbuf_tile(pool, "x codes", (rows, size // FP8_BLOCK, FP8_BLOCK), nl.float8_e4m3)
        inverse = scales[:, 1, :].expand_dim(2).broadcast(2, FP8_BLOCK)
        scale = scales[:, 0, :].expand_dim(2).broadcast(2, FP8_BLOCK)
        nisa.tensor_tensor(dst=codes, data1=blocks, data2=inverse, op=nl.multiply)
        nisa.tensor_tensor(dst=blocks, data1=codes, data2=scale, op=nl.multiply)


def _block_maxima(pool: TilePool, blocks: nl.ndarray) -> nl.ndarray:
    """The largest magnitude of each block of bf16 [rows, blocks, 32]: fp32 [rows, blocks] in SBUF."""
    magnitude = sbuf_tile(pool, "magnitudes", blocks.shape, nl.bfloat16)
    amax = sbuf_tile(pool, "maxima", blocks.shape[0:2], nl.float32)
    nisa.activation(dst=magnitude, op=nl.abs, data=blocks)
    nisa.tensor_reduce(dst=amax, op=nl.maximum, data=magnitude, axis=2)
    return amax


def power_of_two_scales(pool: TilePool, amax: nl.ndarray) -> nl.ndarray:
    """The scale of each block of x and its inverse, from fp32 maxima [rows, blocks], which it overwrites.

    fp32 [rows, 2, blocks] in SBUF; see fp8_round_trip for the scale.
    """
    rows, count = amax.shape
    nisa.tensor_scalar(
        dst=amax, data=amax, op0=nl.maximum, operand0=AMAX_FLOOR, op1=nl.multiply, operand1=1.0 / FP8_MAX
    )
    power = sbuf_tile(pool, "powers", (rows, count), nl.int32)
    above = sbuf_tile(pool, "above", (rows, count), nl.float32)
    scales = sbuf_tile(pool, "x scales", (rows, 2, count), nl.float32)
    nisa.tensor_scalar(dst=power, data=amax.view(nl.int32), op0=nl.bitwise_and, operand0=EXPONENT_BITS)
    below = power.view(nl.float32)
    nisa.tensor_tensor(dst=above, data1=amax, data2=below, op=nl.not_equal)
    nisa.scalar_tensor_tensor(
        dst=scales[:, 0, :], data=above, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=below
    )
    # The bits of 2^-e are those of 1.0, twice, less those of 2^e: multiples of 2^23, which fp32 arithmetic keeps.
    bits = scales.view(nl.int32)
    nisa.tensor_scalar(
        dst=bits[:, 1, :], data=bits[:, 0, :], op0=nl.subtract, operand0=float(2 * ONE_BITS), reverse0=True
    )
    return scales

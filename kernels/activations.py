"""Activations of the GEMM kernels: loaded, optionally taken through the fp8 round trip, transposed."""

import nki.isa as nisa
import nki.language as nl

from .scales import MANTISSA_BITS
from .tiles import P, fold_factor, k_groups, k_tiles, load_folded, transpose_folded

FP8_BLOCK = 32
FP8_MAX = 224.0
AMAX_FLOOR = 1e-4
ROUND_TRIP_PASSES = 3
"""Times that VectorE reads every element of x in the round trip."""

FOLD_WIDTH = 256
CHUNK = 2048
"""Columns that one step of the round trip takes: keeps its fp32 scales in one PSUM bank."""


def load_activations(x: nl.ndarray, width: int, round_trip: bool) -> nl.ndarray:
    """x bf16 [m, k] as fp32 pairs [128, k tiles of `width` columns, width / 256, m], see transpose_folded."""
    m, k = x.shape
    full = k // width
    xt = nl.ndarray((P, k_tiles(k, width), width // 256, m), dtype=nl.float32, buffer=nl.sbuf)
    for row in range(0, m, P):
        rows = min(P, m - row)
        if full > 0:
            segments = fold_factor(full, rows)
            folded = load_folded([x], row, rows, segments, full // segments * width)
            dst = xt[:, 0:full, :, row : row + rows].reshape_dim(1, (segments, full // segments))
            _transpose_after(dst, folded, round_trip)
        if k % width != 0:
            partitions = k % width * P // width
            folded = load_folded([x[:, full * width : k]], row, rows, 1, k % width)
            dst = xt[0:partitions, full : full + 1, :, row : row + rows].reshape_dim(1, (1, 1))
            _transpose_after(dst, folded, round_trip)
    return xt


def _transpose_after(dst: nl.ndarray, folded: nl.ndarray, round_trip: bool) -> None:
    if round_trip:
        fp8_round_trip(folded)
    transpose_folded(dst, folded)


def round_trip_elements(m: int, k: int) -> int:
    """Elements a partition that VectorE goes through for the round trip of x [m, k], in load_activations' layout."""
    elements = 0
    for row in range(0, m, P):
        full = k // FOLD_WIDTH
        elements += ROUND_TRIP_PASSES * (full // fold_factor(full, min(P, m - row)) * FOLD_WIDTH + k % FOLD_WIDTH)
    return elements


def fp8_round_trip(x: nl.ndarray) -> None:
    """x bf16 [rows, columns] in SBUF to e4m3 and back, in place, in blocks of 32 columns with power-of-two scales.

    The scale of a block is the smallest power of two s with max(|x|, AMAX_FLOOR) / s <= 224. Dividing by s and
    multiplying by it are exact, so the only rounding is that to e4m3, to nearest even.
    """
    rows, columns = x.shape
    for start in range(0, columns, CHUNK):
        size = min(CHUNK, columns - start)
        blocks = x[:, start : start + size].reshape_dim(1, (size // FP8_BLOCK, FP8_BLOCK))
        scales = _power_of_two_scales(blocks)
        codes = nl.ndarray((rows, size // FP8_BLOCK, FP8_BLOCK), dtype=nl.float8_e4m3, buffer=nl.sbuf)
        inverse = scales[:, 1, :].expand_dim(2).broadcast(2, FP8_BLOCK)
        scale = scales[:, 0, :].expand_dim(2).broadcast(2, FP8_BLOCK)
        nisa.tensor_tensor(dst=codes, data1=blocks, data2=inverse, op=nl.multiply)
        nisa.tensor_tensor(dst=blocks, data1=codes, data2=scale, op=nl.multiply)


def _power_of_two_scales(blocks: nl.ndarray) -> nl.ndarray:
    """The scale of each block and its inverse: fp32 [rows, 2, blocks] in PSUM, where VectorE reads at full rate."""
    rows, count, _ = blocks.shape
    magnitude = nl.ndarray(blocks.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    amax = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=magnitude, op=nl.abs, data=blocks)
    nisa.tensor_reduce(dst=amax, op=nl.maximum, data=magnitude, axis=2)
    nisa.tensor_scalar(
        dst=amax, data=amax, op0=nl.maximum, operand0=AMAX_FLOOR, op1=nl.multiply, operand1=1.0 / FP8_MAX
    )
    bits = amax.view(nl.int32)
    exponent = nl.ndarray((rows, count), dtype=nl.int32, buffer=nl.sbuf)
    above = nl.ndarray((rows, count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=exponent, data=bits, op0=nl.right_shift, operand0=MANTISSA_BITS)
    nisa.tensor_scalar(dst=above, data=bits, op0=nl.bitwise_and, operand0=(1 << MANTISSA_BITS) - 1)
    nisa.tensor_scalar(dst=above, data=above, op0=nl.not_equal, operand0=0.0)
    nisa.tensor_tensor(dst=exponent, data1=exponent, data2=above, op=nl.add, engine=nisa.engine.vector)
    scales = nl.ndarray((rows, 2, count), dtype=nl.int32, buffer=nl.psum)
    nisa.tensor_scalar(dst=scales[:, 0, :], data=exponent, op0=nl.left_shift, operand0=MANTISSA_BITS)
    nisa.tensor_scalar(dst=exponent, data=exponent, op0=nl.subtract, operand0=254.0, reverse0=True)
    nisa.tensor_scalar(dst=scales[:, 1, :], data=exponent, op0=nl.left_shift, operand0=MANTISSA_BITS)
    return scales.view(nl.float32)


def spread_blocks(moving: nl.ndarray, k: int, blocks: int) -> nl.ndarray:
    """Activations with a column for each scale block of a k tile: bf16 [128, k tiles * halves, 2, blocks, m].

    moving is plane_view's result. Column (block, row) holds the row's values on the block's partitions and zeros
    elsewhere, so a matmul yields the partial sums of every block, which may then be scaled in fp32.
    """
    _, tiles, halves, m, planes = moving.shape
    width = P * halves * planes
    flat = moving.flatten_dims(1, 2).permute((0, 1, 3, 2))
    spread = nl.ndarray((P, tiles * halves, planes, blocks, m), dtype=nl.bfloat16, buffer=nl.sbuf)
    mask = _block_mask(blocks)
    for group in k_groups(k, width, tiles):
        first = group[0] * halves
        end = first + group[1] * halves
        partitions = group[2]
        for block in range(blocks * partitions // P):
            nisa.tensor_scalar(
                dst=spread[0:partitions, first:end, :, block, :],
                data=flat[0:partitions, first:end, :, :],
                op0=nl.multiply,
                operand0=mask[0:partitions, block : block + 1],
                engine=nisa.engine.vector if block % 2 == 0 else nisa.engine.scalar,
            )
    return spread


def _block_mask(blocks: int) -> nl.ndarray:
    """fp32 [128, blocks]: 1 where the partition belongs to the block, else 0."""
    identity = nl.shared_identity_matrix(blocks, dtype=nl.float32)
    bank = nl.ndarray((P, blocks), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=identity.expand_dim(2).broadcast(2, P // blocks))
    mask = nl.ndarray((P, blocks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mask, src=bank, engine=nisa.engine.vector)
    return mask

"""How the hyper-connection kernels lay tokens out: rows of h columns on partitions, folded where tokens are few."""

import nki.isa as nisa
import nki.language as nl

from .records import TokenTile
from .tile_pool import P
from .tiles import fold_factor

FOLD_COLUMNS = 256
"""Columns that a row is folded down to at most: 512 bytes of bf16 still make an efficient DMA run."""

CHUNK = 1024
"""Columns that accumulate in PSUM at a time: two banks."""


def row_segments(columns: int, rows: int) -> int:
    """How many partitions a row of `columns` columns takes when `rows` rows share the 128 partitions."""
    unit = FOLD_COLUMNS
    while columns % unit != 0:
        unit = unit // 2
    return fold_factor(columns // unit, rows)


def load_streams(src: nl.ndarray, segments: int) -> nl.ndarray:
    """src bf16 [rows, streams, columns] in HBM as bf16 [rows * segments, streams, columns / segments] in SBUF."""
    rows, streams, columns = src.shape
    width = columns // segments
    tile = nl.ndarray((rows * segments, streams, width), dtype=nl.bfloat16, buffer=nl.sbuf)
    for stream in range(streams):
        nisa.dma_copy(dst=tile[:, stream, :], src=src[:, stream, :].reshape_dim(1, (segments, width)))
    return tile


def load_coefficients(src: nl.ndarray, segments: int) -> nl.ndarray:
    """src fp32 [rows, count] in HBM on every partition of its row: fp32 [rows * segments, count] in SBUF."""
    rows, count = src.shape
    tile = nl.ndarray((rows * segments, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src.expand_dim(1).broadcast(1, segments))
    return tile


def weighted_sum(dst: nl.ndarray, terms: list[nl.ndarray], weights: list[nl.ndarray]) -> None:
    """dst bf16 = the sum of terms times weights, in order and in fp32. ScalarE takes the first product, VectorE adds.

    The sum waits in PSUM, where VectorE reads it at full rate.
    """
    partitions, columns = dst.shape
    last = len(terms) - 1
    for start in range(0, columns, CHUNK):
        end = min(columns, start + CHUNK)
        acc = nl.ndarray((partitions, end - start), dtype=nl.float32, buffer=nl.psum)
        nisa.activation(dst=acc, op=nl.copy, data=terms[0][:, start:end], scale=weights[0])
        for index in range(1, last + 1):
            nisa.scalar_tensor_tensor(
                dst=dst[:, start:end] if index == last else acc,
                data=terms[index][:, start:end],
                op0=nl.multiply,
                operand0=weights[index],
                op1=nl.add,
                operand1=acc,
            )


def token_tiles(tokens: int) -> list[TokenTile]:
    """Tiles of tokens that fill the partitions."""
    tiles = []
    for first in range(0, tokens, P):
        end = min(first + P, tokens)
        tiles.append(TokenTile(first, end, end - first))
    return tiles

"""Queries of the index on chip, as both kernels that score them need them."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .tile_pool import BANK_FP32, P, TilePool, psum_tile, sbuf_tile


@dataclass
class Queries(nl.NKIObject):
    """Queries `first` to `end` of a launch, on chip: `moving` bf16 [128, tokens * heads], and on all partitions
    `weights` fp32 [128, tokens, heads] and `klen` fp32 [128, tokens].
    """

    first: int
    end: int
    moving: nl.ndarray
    weights: nl.ndarray
    klen: nl.ndarray


def load_queries(
    pool: TilePool, q: nl.ndarray, weights: nl.ndarray, klen: nl.ndarray, first: int, end: int, columns: int = BANK_FP32
) -> list[Queries]:
    """Queries `first` to `end`, in groups of at most `columns` heads: with a tile of keys they fit one PSUM bank."""
    heads = q.shape[1]
    factors = nl.ndarray((P, end - first, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=factors, src=weights[first:end, :].expand_dim(0).broadcast(0, P))
    lengths = sbuf_tile(pool, "lengths", (P, end - first), nl.int32)
    nisa.dma_copy(dst=lengths, src=klen[first:end].expand_dim(0).broadcast(0, P))
    limits = nl.ndarray((P, end - first), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=limits, src=lengths)
    groups = []
    for start in range(first, end, columns // heads):
        stop = min(end, start + columns // heads)
        moving = nl.ndarray((P, (stop - start) * heads), dtype=nl.bfloat16, buffer=nl.sbuf)
        _transpose_queries(pool, moving, q[start:stop].flatten_dims(0, 1))
        here, there = start - first, stop - first
        groups.append(Queries(start, stop, moving, factors[:, here:there, :], limits[:, here:there]))
    return groups


def weigh_heads(pool: TilePool, dst: nl.ndarray, bank: nl.ndarray, weights: nl.ndarray) -> None:
    """dst fp32 [...] in SBUF = the sum over heads of weights [..., heads] * relu(bank [..., heads])."""
    products = sbuf_tile(pool, "products", bank.shape, nl.float32)
    nisa.scalar_tensor_tensor(dst=products, data=bank, op0=nl.maximum, operand0=0.0, op1=nl.multiply, operand1=weights)
    nisa.tensor_reduce(dst=dst, op=nl.add, data=products, axis=len(bank.shape) - 1)


def _transpose_queries(pool: TilePool, moving: nl.ndarray, rows: nl.ndarray) -> None:
    """moving bf16 [128, rows] in SBUF = rows bf16 [rows, 128] in HBM, transposed."""
    total = rows.shape[0]
    for first in range(0, total, P):
        count = min(P, total - first)
        tile = sbuf_tile(pool, "queries", (count, P), nl.bfloat16)
        nisa.dma_copy(dst=tile, src=rows[first : first + count, :])
        bank = psum_tile(pool, (P, count), nl.bfloat16)
        nisa.nc_transpose(dst=bank, data=tile)
        nisa.tensor_copy(dst=moving[:, first : first + count], src=bank)

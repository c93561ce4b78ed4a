"""Tiles that are used again in turn, so that their number does not grow with the work.

A dynamic loop keeps every tile of its body for the entire loop, however short its use is: without this a whole GEMM in
a loop would take far more PSUM than there is.
"""

from dataclasses import dataclass
from typing import Any

import nki.language as nl

P = 128
"""Partitions of SBUF and PSUM."""

BANK_FP32 = 512
"""fp32 elements in a partition of one PSUM bank (2 KiB)."""

BANKS = 4
"""PSUM banks in turn: TensorE fills one while the others are emptied. The other four are for sums that live longer."""

DEPTH = 2
"""SBUF tiles in turn of one role: the next one is loaded while this one is used."""


@dataclass
class TilePool(nl.NKIObject):
    """The tiles of one kernel by role and shape, and how often each was asked for."""

    banks: list[Any]
    tiles: dict[str, Any]
    turns: dict[str, int]


def new_pool() -> TilePool:
    """A pool without tiles: they are made when first asked for."""
    return TilePool([], {}, {})


def _turn(pool: TilePool, key: str, depth: int) -> int:
    """Which of `depth` tiles is next."""
    turn = pool.turns.get(key, 0)
    pool.turns[key] = turn + 1
    return turn % depth


def psum_tile(pool: TilePool, shape: tuple[int, ...], dtype: Any) -> nl.ndarray:
    """A PSUM tile of at most one bank, to be read before BANKS others are taken."""
    turn = _turn(pool, "psum", BANKS)
    if turn == len(pool.banks):
        pool.banks.append(nl.ndarray((P, BANK_FP32), dtype=nl.float32, buffer=nl.psum))
    size = 1
    for index in range(1, len(shape)):
        size *= shape[index]
    return pool.banks[turn].view(dtype)[0 : shape[0], 0:size].reshape(shape)


def psum_sums(pool: TilePool, shape: tuple[int, ...]) -> nl.ndarray:
    """An fp32 PSUM tile of at most one bank that outlives psum_tile's, to be read before DEPTH others are taken."""
    turn = _turn(pool, "sums", DEPTH)
    tiles = pool.tiles.get("sums", [])
    if turn == len(tiles):
        tiles.append(nl.ndarray((P, BANK_FP32), dtype=nl.float32, buffer=nl.psum))
        pool.tiles["sums"] = tiles
    size = 1
    for index in range(1, len(shape)):
        size *= shape[index]
    return tiles[turn][0 : shape[0], 0:size].reshape(shape)


def sbuf_tile(pool: TilePool, role: str, shape: tuple[int, ...], dtype: Any) -> nl.ndarray:
    """An SBUF tile, to be read before DEPTH others of this role and shape are taken."""
    key = f"{role} {shape} {dtype}"
    turn = _turn(pool, key, DEPTH)
    tiles = pool.tiles.get(key, [])
    if turn == len(tiles):
        tiles.append(nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf))
        pool.tiles[key] = tiles
    return tiles[turn]

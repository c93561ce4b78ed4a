"""Lists of keys on chip: which row of a cache stands where, in the three forms that attention needs.

Dimensions, as in sparse_attn:
    queries     a tile of queries, at most 128: one a partition while their lists are read
    keys        entries of all lists of a query, one list after another, each padded to a multiple of KEY_STEP
    blocks      groups of at most 128 consecutive keys of one list: a partition each once they are gathered
"""

import nki.isa as nisa
import nki.language as nl

from .records import KeyBlock, KeyLists, TokenTile
from .tile_pool import P

KEY_STEP = 32
"""Lists are padded to a multiple of this: TensorE's smallest tile, and an even number of two-byte columns in PSUM."""

EMPTY_SCORE = -(2.0**126)
"""What is added to the score of an empty entry: exp of it is 0 beside any maximum above LOWEST_MAXIMUM."""


def padded(keys: int) -> int:
    """Keys of a list with its padding."""
    return (keys + KEY_STEP - 1) // KEY_STEP * KEY_STEP


def key_blocks(lengths: list[int]) -> list[KeyBlock]:
    """The blocks of lists of these lengths, one list after another."""
    blocks = []
    offset = 0
    for source in range(len(lengths)):
        end = offset + padded(lengths[source])
        while offset < end:
            keys = min(P, end - offset)
            blocks.append(KeyBlock(source, offset, keys))
            offset += keys
    return blocks


def load_lists(lists: list[nl.ndarray], tile: TokenTile, blocks: list[KeyBlock]) -> KeyLists:
    """The lists int32 [t, k] of a tile of queries, on chip in every form that is needed of them."""
    numbers = _numbers(lists, tile, blocks)
    bias = nl.ndarray(numbers.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bias, data=numbers, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=EMPTY_SCORE)
    rows = nl.ndarray((P, len(blocks), tile.rows), dtype=nl.int32, buffer=nl.sbuf)
    masks = nl.ndarray((P, len(blocks), tile.rows), dtype=nl.int32, buffer=nl.sbuf)
    for index in range(len(blocks)):
        block = blocks[index]
        turned = nl.ndarray((block.keys, tile.rows), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=numbers[:, block.offset : block.offset + block.keys])
        nisa.tensor_scalar(dst=rows[0 : block.keys, index, :], data=turned, op0=nl.maximum, operand0=0.0)
        nisa.tensor_scalar(
            dst=masks[0 : block.keys, index, :],
            data=turned,
            op0=nl.greater_equal,
            operand0=0.0,
            op1=nl.multiply,
            operand1=-1.0,
        )
    return KeyLists(bias, rows, masks)


def _numbers(lists: list[nl.ndarray], tile: TokenTile, blocks: list[KeyBlock]) -> nl.ndarray:
    """Entries as fp32 [queries, keys], which holds row numbers below 2^24 exactly; padding is empty."""
    width = blocks[-1].offset + blocks[-1].keys
    entries = nl.ndarray((tile.rows, width), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=entries, value=-1)
    offset = 0
    for source in range(len(lists)):
        length = lists[source].shape[1]
        nisa.dma_copy(dst=entries[:, offset : offset + length], src=lists[source][tile.first : tile.end, :])
        offset += padded(length)
    numbers = nl.ndarray((tile.rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=numbers, src=entries)
    return numbers

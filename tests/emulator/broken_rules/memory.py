"""Memories, capacities and what was written."""

from __future__ import annotations

from typing import Any

import numpy as np
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator import rules
from nki_emulator.isa import engine

from tests.emulator.broken_rules import breaks, breaks_launch
from tests.emulator.support import P, empty, execute, tile


@breaks_launch(rules.BUFFER, "tensor_copy", "src")
def compute_on_hbm() -> None:
    execute(lambda a: nisa.tensor_copy(dst=empty((4, 4)), src=a), np.zeros((4, 4), np.float32))


@breaks(rules.BUFFER, "nc_matmul", "dst")
def matmul_into_sbuf() -> None:
    nisa.nc_matmul(dst=empty((4, 4)), stationary=tile((4, 4)), moving=tile((4, 4)))


@breaks(rules.BUFFER, "nc_matmul", "moving")
def matmul_from_psum() -> None:
    moving = tile((4, 4), buffer=nl.psum)
    nisa.nc_matmul(dst=empty((4, 4), buffer=nl.psum), stationary=tile((4, 4)), moving=moving)


@breaks(rules.BUFFER, "iota", "dst")
def iota_into_psum() -> None:
    nisa.iota(dst=empty((P, 4), nl.int32, nl.psum), pattern=[[1, 4]])


@breaks(rules.DMA_NO_PSUM, "dma_copy", "src")
def dma_from_psum() -> None:
    nisa.dma_copy(dst=empty((P, 4)), src=tile((P, 4), buffer=nl.psum))


@breaks(rules.DMA_NO_PSUM, "dma_copy", "dst")
def dma_to_psum() -> None:
    nisa.dma_copy(dst=empty((P, 4), buffer=nl.psum), src=tile((P, 4)))


@breaks(rules.GPSIMD_NO_PSUM, "tensor_copy", "src")
def gpsimd_reads_psum() -> None:
    nisa.tensor_copy(dst=empty((P, 4)), src=tile((P, 4), buffer=nl.psum), engine=engine.gpsimd)


@breaks(rules.BOTH_PSUM, "tensor_tensor", "data2")
def two_psum_inputs() -> None:
    a, b = tile((P, 4), buffer=nl.psum), tile((P, 4), buffer=nl.psum)
    nisa.tensor_tensor(dst=empty((P, 4)), data1=a, data2=b, op=nl.add)


@breaks(rules.BOTH_PSUM, "scalar_tensor_tensor", "operand1")
def two_psum_inputs_of_scalar_tensor_tensor() -> None:
    a, b = tile((P, 4), buffer=nl.psum), tile((P, 4), buffer=nl.psum)
    nisa.scalar_tensor_tensor(dst=empty((P, 4)), data=a, op0=nl.add, operand0=1.0, op1=nl.add, operand1=b)


@breaks(rules.UNWRITTEN_READ, "tensor_copy", "src")
def read_before_write() -> None:
    nisa.tensor_copy(dst=empty((P, 4)), src=empty((P, 4)))


@breaks(rules.UNWRITTEN_READ, "tensor_copy", "src")
def read_of_a_half_written_tile() -> None:
    t = empty((P, 4))
    nisa.memset(dst=t[:, 0:3], value=0.0)
    nisa.tensor_copy(dst=empty((P, 4)), src=t)


@breaks(rules.UNWRITTEN_READ, "tensor_copy_predicated", "dst")
def predicated_copy_over_nothing() -> None:
    mask = tile((P, 4), nl.uint8)
    nisa.tensor_copy_predicated(dst=empty((P, 4)), src=tile((P, 4)), predicate=mask)


@breaks(rules.UNWRITTEN_READ, "nc_stream_shuffle", "dst")
def shuffle_that_leaves_nothing() -> None:
    nisa.nc_stream_shuffle(dst=empty((32, 4)), src=tile((32, 4)), shuffle_mask=[255] + [0] * 31)


@breaks(rules.DEAD_TENSOR, "tensor_copy", "src")
def tensor_of_a_loop_body() -> None:
    kept = []

    def body(i: Any) -> None:
        kept.append(tile((P, 4)))

    nl.fori_loop(0, 1, body)
    nisa.tensor_copy(dst=empty((P, 4)), src=kept[0])


@breaks(rules.SBUF_CAPACITY, "nl.ndarray")
def full_sbuf() -> None:
    tiles = [tile((P, 25600)), tile((P, 25600)), empty((P, 4096))]
    nisa.memset(dst=tiles[2], value=0.0)
    for t in tiles:
        nisa.tensor_copy(dst=t, src=t)


@breaks(rules.PSUM_CAPACITY, "nl.ndarray")
def nine_banks() -> None:
    for t in [tile((P, 8), buffer=nl.psum) for _ in range(9)]:
        nisa.tensor_copy(dst=t, src=t)


@breaks(rules.PSUM_CAPACITY, "nl.ndarray")
def nine_banks_in_a_loop_whose_uses_follow_each_other() -> None:
    def body(i: Any) -> None:
        for _ in range(9):
            tile((P, 8), buffer=nl.psum)

    nl.fori_loop(0, 1, body)


@breaks(rules.PSUM_BANK, "nc_matmul", "dst")
def matmul_across_banks() -> None:
    out = empty((4, 1024), buffer=nl.psum)
    nisa.nc_matmul(dst=out[:, 256:768], stationary=tile((4, 4)), moving=tile((4, 512)))


@breaks(rules.PSUM_BANK, "nc_transpose", "dst")
def transpose_across_banks() -> None:
    out = empty((P, 1024), buffer=nl.psum)
    nisa.nc_transpose(dst=out[:, 448:576], data=tile((P, P)))


@breaks(rules.PSUM_WORD, "nc_transpose", "dst")
def odd_bf16_columns_in_psum() -> None:
    nisa.nc_transpose(dst=empty((P, 3), nl.bfloat16, nl.psum), data=tile((3, P), nl.bfloat16))


@breaks(rules.PSUM_SIZE, "tensor_copy", "src")
def broadcast_beyond_psum() -> None:
    source = tile((P, 1), buffer=nl.psum).broadcast(1, 4097)
    nisa.tensor_copy(dst=empty((P, 4097)), src=source)

"""Shapes, indices, views and access patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulator_support import P, empty, execute, tile
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator import rules

from . import breaks, breaks_launch


@breaks(rules.SHAPE_ARGS, "nl.ndarray", "shape")
def one_dimension_on_chip() -> None:
    empty((P,))


@breaks(rules.SHAPE_ARGS, "nl.ndarray", "shape")
def empty_dimension() -> None:
    empty((P, 0))


@breaks(rules.PARTITION_COUNT, "nl.ndarray", "shape")
def too_many_partitions() -> None:
    empty((P + 1, 4))


@breaks(rules.PARTITION_START, "tensor_copy", "src")
def odd_start_partition() -> None:
    nisa.tensor_copy(dst=empty((16, 4)), src=tile((P, 4))[16:32, :])


@breaks(rules.PARTITION_START, "tensor_copy", "src")
def start_32_for_64_partitions() -> None:
    nisa.tensor_copy(dst=empty((64, 4)), src=tile((P, 4))[32:96, :])


@breaks(rules.PARTITION_START, "tensor_copy", "dst")
def start_32_for_96_partitions() -> None:
    nisa.tensor_copy(dst=empty((P, 4))[32:128, :], src=tile((96, 4)))


@breaks(rules.PARTITION_STEP, "tensor[...]")
def partition_step() -> None:
    tile((P, 4))[0:P:2, :]


@breaks(rules.PARTITION_STEP, "tensor.permute")
def partition_permuted() -> None:
    tile((P, 4)).permute((1, 0))


@breaks(rules.PARTITION_STEP, "tensor.broadcast")
def partition_broadcast() -> None:
    tile((1, 4)).broadcast(0, P)


@breaks(rules.PARTITION_STEP, "tensor.reshape")
def partition_reshaped() -> None:
    tile((P, 4)).reshape((64, 8))


@breaks(rules.PARTITION_STEP, "tensor.ap")
def pattern_with_another_row_size() -> None:
    tile((P, 4)).ap(pattern=[[8, 64], [1, 4]])


@breaks(rules.INDEX_RANGE, "tensor[...]")
def slice_beyond_the_end() -> None:
    tile((P, 4))[:, 2:5]


@breaks(rules.INDEX_RANGE, "tensor[...]")
def empty_slice() -> None:
    tile((P, 4))[:, 2:2]


@breaks(rules.INDEX_RANGE, "tensor[...]")
def index_beyond_the_end() -> None:
    tile((P, 4))[:, 4]


@breaks(rules.INDEX_RANGE, "tensor.ap")
def pattern_beyond_the_row() -> None:
    tile((P, 4)).ap(pattern=[[4, P], [1, 4]], offset=1)


@breaks(rules.INDEX_RANGE, "tensor.ap")
def pattern_beyond_the_partitions() -> None:
    tile((P, 4)).ap(pattern=[[4, P], [1, 4]], offset=4)


@breaks(rules.INDEX_KIND, "tensor[...]")
def boolean_index() -> None:
    tile((P, 4))[[True, False]]


@breaks(rules.INDEX_KIND, "tensor[...]")
def new_axis() -> None:
    tile((P, 4))[:, None, :]


@breaks(rules.INDEX_KIND, "tensor[...]")
def register_as_an_index() -> None:
    tile((P, 4))[:, nisa.register_alloc(1)]


@breaks(rules.VIEW, "tensor.reshape")
def reshape_to_another_count() -> None:
    tile((P, 4)).reshape((P, 5))


@breaks(rules.VIEW, "tensor.reshape")
def reshape_of_a_permuted_view() -> None:
    tile((P, 4, 3)).permute((0, 2, 1)).reshape((P, 12))


@breaks(rules.VIEW, "tensor.view")
def view_of_an_odd_count() -> None:
    tile((P, 3), nl.uint8).view(nl.bfloat16)


@breaks(rules.VIEW, "tensor.view")
def view_at_a_misaligned_offset() -> None:
    tile((P, 4), nl.uint8)[:, 1:3].view(nl.bfloat16)


@breaks(rules.VIEW, "tensor.view")
def wider_view_of_a_strided_row() -> None:
    tile((P, 4), nl.uint8)[:, 0:4:2].view(nl.bfloat16)


@breaks(rules.VIEW, "tensor.broadcast")
def broadcast_of_a_full_dimension() -> None:
    tile((P, 4)).broadcast(1, 8)


@breaks(rules.VIEW, "tensor.ap")
def pattern_of_a_view() -> None:
    tile((P, 4))[:, 0:2].ap(pattern=[[4, P], [1, 2]])


@breaks(rules.VIEW_RANK, "tensor")
def six_dimensions() -> None:
    tile((P, 2, 2, 2, 2)).expand_dim(1)


@breaks_launch(rules.STRIDE_RANGE, "dma_copy", "src")
def wide_step() -> None:
    def body(a: Any) -> None:
        columns = a.ap(pattern=[[1, 2], [40000, 2]])
        nisa.dma_copy(dst=empty((2, 2)), src=columns)

    execute(body, np.zeros((2, 40000), np.float32))


@breaks(rules.BROADCAST_WRITE, "memset", "dst")
def write_to_a_broadcast() -> None:
    nisa.memset(dst=empty((P, 1)).broadcast(1, 4), value=0.0)


@breaks(rules.BROADCAST_WRITE, "memset", "dst")
def write_to_overlapping_windows() -> None:
    nisa.memset(dst=empty((P, 8)).ap(pattern=[[8, P], [2, 3], [1, 4]]), value=0.0)


@breaks(rules.SAME_SHAPE, "tensor_tensor", "data2")
def implicit_broadcast() -> None:
    nisa.tensor_tensor(dst=empty((P, 4)), data1=tile((P, 4)), data2=tile((P, 1)), op=nl.add)


@breaks(rules.SAME_SHAPE, "tensor_reduce", "dst")
def reduction_into_the_wrong_shape() -> None:
    nisa.tensor_reduce(dst=empty((P, 4)), op=nl.add, data=tile((P, 4)), axis=1)


@breaks(rules.OVERLAP, "tensor_copy", "dst")
def shifted_copy_in_place() -> None:
    t = tile((P, 8))
    nisa.tensor_copy(dst=t[:, 1:8], src=t[:, 0:7])


@breaks(rules.OVERLAP, "dma_copy", "dst")
def shifted_dma_in_place() -> None:
    t = tile((P, 8))
    nisa.dma_copy(dst=t[:, 1:8], src=t[:, 0:7])


@breaks(rules.FREE_DIMS, "tensor_copy", "src")
def four_free_dimensions() -> None:
    source = tile((P, 2, 3)).expand_dim(2).broadcast(2, 2).expand_dim(4).broadcast(4, 2)
    nisa.tensor_copy(dst=empty((P, 2, 2, 3, 2)), src=source)

"""Shapes, indices, views and access patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator import rules

from tests.emulator.broken_rules import breaks, breaks_launch
from tests.emulator.support import P, empty, execute, load, tile


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


@breaks(rules.VIEW_RANK, "tensor")
def six_dimensions() -> None:
    tile((P, 2, 2, 2, 2)).expand_dim(1)


@breaks_launch(rules.STRIDE_RANGE, "tensor_copy", "src")
def wide_step() -> None:
    def body(a: Any) -> None:
        nisa.tensor_copy(dst=empty((2, 2), nl.uint8), src=load(a)[:, :, 0])

    execute(body, np.zeros((2, 2, 40000), np.uint8))


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


@breaks(rules.UNWRITTEN_READ, "tensor_copy", "offset")
def offset_that_nobody_wrote() -> None:
    view = tile((P, 4, 2)).select(1, empty((1, 1), nl.uint32))
    nisa.tensor_copy(dst=empty((P, 2)), src=view)


@breaks(rules.DYNAMIC_OFFSET, "tensor_copy", "src")
def signed_offset_on_chip() -> None:
    nisa.tensor_copy(dst=empty((P, 2)), src=tile((P, 4, 2)).select(1, tile((1, 1), nl.int32)))


@breaks(rules.DYNAMIC_OFFSET, "tensor_copy", "offset")
def dynamic_offset_beyond_the_view() -> None:
    view = tile((P, 4, 2))[:, 0:2].select(1, nisa.register_alloc(2))
    nisa.tensor_copy(dst=empty((P, 2)), src=view)


@breaks(rules.DYNAMIC_OFFSET, "tensor", "offset")
def offset_of_another_kind() -> None:
    tile((P, 4, 2)).select(1, "0")


@breaks(rules.DYNAMIC_OFFSET, "tensor.ap", "indirect_dim")
def dynamic_partition() -> None:
    tile((P, 4)).ap(pattern=[[4, 32], [1, 4]], scalar_offset=nisa.register_alloc(0), indirect_dim=0)


@breaks(rules.INDEX_KIND, "tensor[...]")
def three_indices_of_two_dimensions() -> None:
    tile((P, 4))[0:P, 0, 0]


@breaks(rules.INDEX_KIND, "tensor[...]")
def float_slice() -> None:
    tile((P, 4))[:, 0:2.0]


@breaks(rules.VIEW, "tensor.expand_dim")
def dimension_beyond_the_rank() -> None:
    tile((P, 4)).expand_dim(4)


@breaks(rules.VIEW, "tensor.slice")
def slice_of_a_missing_dimension() -> None:
    tile((P, 4)).slice(2, 0, 1)


@breaks(rules.VIEW, "tensor.select")
def selection_of_a_missing_dimension() -> None:
    tile((P, 4)).select(2, 0)


@breaks(rules.VIEW, "tensor.view")
def view_after_a_dynamic_select() -> None:
    tile((P, 4, 2)).select(1, nisa.register_alloc(0)).view(nl.bfloat16)


@breaks(rules.VIEW, "tensor.permute")
def permutation_with_a_repetition() -> None:
    tile((P, 4, 2)).permute((0, 1, 1))


@breaks(rules.VIEW, "tensor.squeeze_dim")
def squeeze_of_a_full_dimension() -> None:
    tile((P, 4, 2)).squeeze_dim(1)


@breaks(rules.VIEW, "tensor.squeeze_dim")
def squeeze_of_the_only_free_dimension() -> None:
    tile((P, 1)).squeeze_dim(1)


@breaks(rules.VIEW, "tensor.reshape_dim")
def split_into_another_count() -> None:
    tile((P, 4)).reshape_dim(1, (2, 3))


@breaks(rules.VIEW, "tensor.flatten_dims")
def flattening_of_permuted_dimensions() -> None:
    tile((P, 4, 2)).permute((0, 2, 1)).flatten_dims(1, 2)


@breaks(rules.VIEW, "tensor.flatten_dims")
def flattening_backwards() -> None:
    tile((P, 4, 2)).flatten_dims(2, 1)


@breaks(rules.VIEW, "tensor.ap")
def pattern_with_a_negative_stride() -> None:
    tile((P, 4)).ap(pattern=[[4, P], [-1, 4]], offset=3)


@breaks_launch(rules.VIEW, "tensor.ap")
def pattern_of_an_element_that_does_not_fit() -> None:
    execute(lambda a: a.ap(pattern=[[1, 1]], dtype=nl.float32), np.zeros((3, 2), np.uint8))


@breaks(rules.GATHER, "tensor.ap", "indices")
def gather_on_chip() -> None:
    tile((P, 4)).ap(pattern=[[4, P], [1, 4]], vector_offset=tile((P, 1), nl.int32))


@breaks_launch(rules.GATHER, "tensor.ap", "vector_offset")
def gather_of_half_rows() -> None:
    execute(lambda a: a.ap(pattern=[[2, 4], [1, 2]], vector_offset=tile((4, 1), nl.int32)), np.ones((4, 4), np.float32))


@breaks_launch(rules.GATHER, "tensor.vector_select", "indices")
def gather_by_floats() -> None:
    execute(lambda a: a.vector_select(0, tile((4, 1))), np.ones((4, 4), np.float32))


@breaks_launch(rules.GATHER, "tensor.vector_select", "dim")
def gather_of_columns() -> None:
    execute(lambda a: a.vector_select(1, tile((4, 1), nl.int32)), np.ones((4, 4), np.float32))


def gathering(indices: list[int], shape: tuple[int, ...] | None = None, **options: Any) -> None:
    """A DMA of the rows of a (4, 4) argument that `indices` name."""

    def body(a: Any, b: Any) -> None:
        chosen = a.vector_select(0, load(b))
        nisa.dma_copy(dst=empty(shape or (len(indices), 4)), src=chosen, **options)

    execute(body, np.ones((4, 4), np.float32), np.array(indices, np.int32)[:, None])


@breaks_launch(rules.GATHER, "dma_copy", "src")
def gather_into_fewer_rows() -> None:
    gathering([0, 1], shape=(1, 8))


@breaks_launch(rules.GATHER, "dma_copy", "dge_mode")
def gather_by_hardware_descriptors() -> None:
    gathering([0, 1], dge_mode=nisa.dge_mode.hwdge)


@breaks_launch(rules.GATHER_ROW, "dma_copy", "indices")
def gather_of_a_row_that_does_not_exist() -> None:
    gathering([0, 4])


@breaks_launch(rules.GATHER, "dma_transpose", "src")
def transposing_gather() -> None:
    def body(a: Any) -> None:
        nisa.dma_transpose(dst=empty((4, 4)), src=a.vector_select(0, tile((4, 1), nl.int32)))

    execute(body, np.ones((4, 4), np.float32))


@breaks_launch(rules.GATHER_ROW, "dma_copy", "dst")
def scatter_of_two_values_to_one_row() -> None:
    def body(a: Any, b: Any) -> None:
        nisa.dma_copy(dst=a.vector_select(0, tile((2, 1), nl.int32)), src=load(b))

    execute(body, np.ones((4, 4), np.float32), np.arange(8, dtype=np.float32).reshape(2, 4))


@breaks_launch(rules.DYNAMIC_OFFSET, "dma_copy", "offset")
def scalar_offset_outside() -> None:
    def body(a: Any) -> None:
        nisa.dma_copy(dst=empty((1, 4)), src=a.ap([[4, 1], [1, 4]], scalar_offset=tile((1, 1), nl.int32, value=4)))

    execute(body, np.ones((4, 4), np.float32))


@breaks_launch(rules.DYNAMIC_OFFSET, "dma_copy", "offset")
def skipped_in_part() -> None:
    def body(a: Any) -> None:
        rows = a.ap([[4, 2], [1, 4]], scalar_offset=tile((1, 1), nl.int32, value=3))
        nisa.dma_copy(dst=empty((2, 4)), src=rows, oob_mode=nisa.oob_mode.skip)

    execute(body, np.ones((4, 4), np.float32))


@breaks(rules.TRN2_ONLY, "tensor.ap")
def pattern_of_fn_codes() -> None:
    tile((P, 4), nl.uint8).ap(pattern=[[4, P], [1, 4]], dtype=nl.float8_e4m3fn)

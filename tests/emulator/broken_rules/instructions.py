"""Engines, operators and the instructions but for matmuls."""

from __future__ import annotations

from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator import rules
from nki_emulator.isa import engine

from tests.emulator.broken_rules import breaks
from tests.emulator.support import P, empty, tile


@breaks(rules.ENGINE, "tensor_scalar", "engine")
def maximum_on_scalar_engine() -> None:
    nisa.tensor_scalar(dst=empty((P, 4)), data=tile((P, 4)), op0=nl.maximum, operand0=1.0, engine=engine.scalar)


@breaks(rules.ENGINE, "tensor_scalar", "engine")
def multiply_on_gpsimd() -> None:
    nisa.tensor_scalar(dst=empty((P, 4)), data=tile((P, 4)), op0=nl.multiply, operand0=1.0, engine=engine.gpsimd)


@breaks(rules.ENGINE, "tensor_tensor", "engine")
def bitvec_on_gpsimd() -> None:
    t = tile((P, 4), nl.int32)
    nisa.tensor_tensor(dst=t, data1=t, data2=t, op=nl.bitwise_or, engine=engine.gpsimd)


@breaks(rules.ENGINE, "memset", "engine")
def memset_on_scalar_engine() -> None:
    nisa.memset(dst=empty((P, 4)), value=0.0, engine=engine.scalar)


@breaks(rules.GPSIMD_NO_FP8, "tensor_copy", "src")
def fp8_on_gpsimd() -> None:
    codes = tile((P, 4), nl.uint8).view(nl.float8_e4m3)
    nisa.tensor_copy(dst=empty((P, 4)), src=codes, engine=engine.gpsimd)


@breaks(rules.OP_CLASS, "tensor_scalar", "op1")
def mixed_operator_classes() -> None:
    t = tile((P, 4), nl.int32)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.bitwise_and, operand0=7, op1=nl.add, operand1=1)


@breaks(rules.OP_CLASS, "scalar_tensor_tensor", "op0")
def bitvec_in_scalar_tensor_tensor() -> None:
    t = tile((P, 4), nl.int32)
    nisa.scalar_tensor_tensor(dst=t, data=t, op0=nl.bitwise_or, operand0=1, op1=nl.add, operand1=t)


@breaks(rules.OP_CLASS, "tensor_tensor", "op")
def activation_function_as_alu_operator() -> None:
    nisa.tensor_tensor(dst=tile((P, 4)), data1=tile((P, 4)), data2=tile((P, 4)), op=nl.exp)


@breaks(rules.BITVEC, "tensor_scalar", "data")
def bitvec_that_changes_type() -> None:
    data = tile((P, 4), nl.uint8)
    nisa.tensor_scalar(dst=empty((P, 4), nl.int32), data=data, op0=nl.left_shift, operand0=1)


@breaks(rules.BITVEC, "tensor_scalar", "data")
def bitvec_on_floats() -> None:
    nisa.tensor_scalar(dst=tile((P, 4)), data=tile((P, 4)), op0=nl.bitwise_and, operand0=1)


@breaks(rules.SCALAR_OPERAND, "tensor_scalar", "operand0")
def bitvec_with_a_tile_of_another_type() -> None:
    t = tile((P, 4), nl.int32)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.bitwise_and, operand0=tile((P, 1), nl.uint32))


@breaks(rules.CONSTANT, "tensor_scalar", "shift")
def shift_by_a_tile_of_too_much() -> None:
    t = tile((P, 4), nl.int32)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.left_shift, operand0=tile((P, 1), nl.int32, value=32))


@breaks(rules.BITVEC, "tensor_reduce", "data")
def bit_reduction_of_signed_bytes() -> None:
    nisa.tensor_reduce(dst=empty((P, 1), nl.int8), op=nl.bitwise_or, data=tile((P, 4), nl.int8), axis=1)


@breaks(rules.BITVEC, "tensor_tensor", "data1")
def bitvec_of_two_types() -> None:
    a, b = tile((P, 4), nl.int32), tile((P, 4), nl.uint32)
    nisa.tensor_tensor(dst=b, data1=a, data2=b, op=nl.bitwise_or)


@breaks(rules.SCALAR_OPERAND, "tensor_scalar", "operand0")
def bf16_operand_tile() -> None:
    operand = tile((P, 1), nl.bfloat16)
    nisa.tensor_scalar(dst=tile((P, 4)), data=tile((P, 4)), op0=nl.multiply, operand0=operand)


@breaks(rules.SCALAR_OPERAND, "activation", "scale")
def wide_scale_tile() -> None:
    nisa.activation(dst=tile((P, 4)), op=nl.copy, data=tile((P, 4)), scale=tile((P, 2)))


@breaks(rules.SCALAR_OPERAND, "scalar_tensor_tensor", "operand0")
def operand_of_other_partitions() -> None:
    t = tile((P, 4))
    nisa.scalar_tensor_tensor(dst=t, data=t, op0=nl.add, operand0=tile((64, 1)), op1=nl.add, operand1=t)


@breaks(rules.UNARY, "tensor_scalar", "operand0")
def abs_with_an_operand() -> None:
    nisa.tensor_scalar(dst=tile((P, 4)), data=tile((P, 4)), op0=nl.abs, operand0=2.0)


@breaks(rules.REDUCE_AXES, "tensor_reduce", "axis")
def partition_reduction() -> None:
    nisa.tensor_reduce(dst=empty((1, 4)), op=nl.add, data=tile((P, 4)), axis=0)


@breaks(rules.REDUCE_AXES, "tensor_reduce", "axis")
def reduction_of_a_middle_axis() -> None:
    nisa.tensor_reduce(dst=empty((P, 3)), op=nl.add, data=tile((P, 4, 3)), axis=1)


@breaks(rules.REDUCE_OP, "tensor_reduce", "op")
def reduction_by_comparison() -> None:
    nisa.tensor_reduce(dst=empty((P, 1)), op=nl.greater, data=tile((P, 4)), axis=1)


@breaks(rules.REDUCE_OP, "tensor_scalar_reduce", "reduce_op")
def subtracting_reduction() -> None:
    t, s = tile((P, 4)), empty((P, 1))
    nisa.tensor_scalar_reduce(dst=t, data=t, op0=nl.abs, operand0=0.0, reduce_op=nl.subtract, reduce_res=s)


@breaks(rules.REDUCE_CMD, "activation", "reduce_res")
def result_of_an_idle_reduction() -> None:
    nisa.activation(dst=tile((P, 4)), op=nl.copy, data=tile((P, 4)), reduce_res=empty((P, 1)))


@breaks(rules.REDUCE_CMD, "activation", "reduce_op")
def maximum_on_scalar_engine_registers() -> None:
    cmd = nisa.reduce_cmd.reset_reduce
    nisa.activation(dst=tile((P, 4)), op=nl.copy, data=tile((P, 4)), reduce_op=nl.maximum, reduce_cmd=cmd)


@breaks(rules.ACTIVATION, "activation", "op")
def alu_operator_as_activation() -> None:
    nisa.activation(dst=tile((P, 4)), op=nl.add, data=tile((P, 4)))


@breaks(rules.ACTIVATION_COUNT, "activation", "op")
def nine_activation_functions() -> None:
    names = ("copy", "square", "sigmoid", "relu", "silu", "tanh", "exp", "log", "sqrt")
    for name in names:
        nisa.activation(dst=tile((P, 4)), op=getattr(nl, name), data=tile((P, 4)))


@breaks(rules.DMA_COUNT, "dma_copy", "src")
def dma_of_unequal_counts() -> None:
    nisa.dma_copy(dst=empty((P, 4)), src=tile((P, 3)))


@breaks(rules.DMA_MODE, "dma_copy", "dge_mode")
def casting_hwdge() -> None:
    mode = nisa.dge_mode.hwdge
    nisa.dma_copy(dst=empty((P, 4), nl.bfloat16), src=tile((P, 4)), dge_mode=mode)


@breaks(rules.DMA_MODE, "dma_copy", "engine")
def queue_without_hwdge() -> None:
    nisa.dma_copy(dst=empty((P, 4)), src=tile((P, 4)), engine=engine.scalar)


@breaks(rules.DMA_MODE, "dma_copy", "priority")
def dma_priority() -> None:
    nisa.dma_copy(dst=empty((P, 4)), src=tile((P, 4)), priority=0)


@breaks(rules.DMA_TRANSPOSE, "dma_transpose", "dst")
def byte_transpose() -> None:
    nisa.dma_transpose(dst=empty((4, P), nl.uint8), src=tile((P, 4), nl.uint8))


@breaks(rules.DMA_TRANSPOSE, "dma_transpose", "dst")
def dma_transpose_into_the_wrong_shape() -> None:
    nisa.dma_transpose(dst=empty((P, 4)), src=tile((P, 4)))


@breaks(rules.DMA_TRANSPOSE, "dma_transpose", "axes")
def dma_transpose_of_other_axes() -> None:
    nisa.dma_transpose(dst=empty((4, P, 3)), src=tile((P, 4, 3)), axes=(1, 0, 2))


@breaks(rules.DYNAMIC_OFFSET, "tensor_copy", "offset")
def dynamic_offset_beyond_the_end() -> None:
    t = tile((P, 4, 2))
    nisa.tensor_copy(dst=empty((P, 2)), src=t.select(1, nisa.register_alloc(4)))


@breaks(rules.DYNAMIC_OFFSET, "tensor", "offset")
def float_offset() -> None:
    tile((P, 4, 2)).select(1, tile((1, 1)))


@breaks(rules.DYNAMIC_OFFSET, "tensor")
def two_dynamic_offsets() -> None:
    r = nisa.register_alloc(0)
    tile((P, 4, 2)).select(1, r).select(1, r)


@breaks(rules.PREDICATE, "tensor_copy_predicated", "predicate")
def float_predicate() -> None:
    nisa.tensor_copy_predicated(dst=tile((P, 4)), src=tile((P, 4)), predicate=tile((P, 4)))


@breaks(rules.PREDICATE, "select_reduce", "predicate")
def word_predicate() -> None:
    mask = tile((P, 4), nl.int32)
    nisa.select_reduce(dst=tile((P, 4)), predicate=mask, on_true=tile((P, 4)), on_false=0.0)


@breaks(rules.IOTA_PATTERN, "iota", "pattern")
def short_pattern() -> None:
    nisa.iota(dst=empty((P, 4), nl.int32), pattern=[[1, 3]])


@breaks(rules.REDUCE_CMD, "activation", "reduce_cmd")
def sum_on_registers_that_were_never_reset() -> None:
    cmd = nisa.reduce_cmd.reduce
    nisa.activation(dst=tile((P, 4)), op=nl.copy, data=tile((P, 4)), reduce_op=nl.add, reduce_cmd=cmd)


@breaks(rules.DMA_MODE, "dma_copy", "dge_mode")
def fixed_descriptors_for_a_run_time_address() -> None:
    source = tile((P, 2, 4)).select(1, nisa.register_alloc(0))
    nisa.dma_copy(dst=empty((P, 4)), src=source, dge_mode=nisa.dge_mode.none)


@breaks(rules.DYNAMIC_OFFSET, "tensor_copy", "offset")
def pattern_moved_beyond_the_row() -> None:
    pattern = [[8, P], [1, 4]]
    source = tile((P, 4, 2)).ap(pattern=pattern, scalar_offset=nisa.register_alloc(3), indirect_dim=1)
    nisa.tensor_copy(dst=empty((P, 4)), src=source)


@breaks(rules.OPERAND_KIND, "tensor_tensor", "op")
def operator_as_string() -> None:
    nisa.tensor_tensor(dst=tile((P, 4)), data1=tile((P, 4)), data2=tile((P, 4)), op="add")


@breaks(rules.OP_CLASS, "tensor_tensor", "op")
def unary_operator_of_two_tensors() -> None:
    nisa.tensor_tensor(dst=tile((P, 4)), data1=tile((P, 4)), data2=tile((P, 4)), op=nl.abs)


@breaks(rules.OP_CLASS, "affine_select", "cmp_op")
def selection_by_sum() -> None:
    t = tile((P, 4))
    nisa.affine_select(dst=t, pattern=[[1, 4]], channel_multiplier=0, on_true_tile=t, on_false_value=0.0, cmp_op=nl.add)


@breaks(rules.OP_CLASS, "tensor_scalar_reduce", "op0")
def bitvec_in_tensor_scalar_reduce() -> None:
    t, s = tile((P, 4), nl.int32), empty((P, 1))
    nisa.tensor_scalar_reduce(dst=t, data=t, op0=nl.bitwise_and, operand0=1, reduce_op=nl.add, reduce_res=s)


@breaks(rules.ENGINE, "tensor_scalar", "op0")
def rsqrt_with_a_second_operator() -> None:
    t = tile((P, 4))
    nisa.tensor_scalar(dst=t, data=t, op0=nl.rsqrt, operand0=0.0, op1=nl.add, operand1=1.0)


@breaks(rules.NOT_MODELLED, "tensor_scalar_reduce", "reduce_cmd")
def reduction_on_earlier_registers() -> None:
    t, s, cmd = tile((P, 4)), empty((P, 1)), nisa.reduce_cmd.reduce
    nisa.tensor_scalar_reduce(dst=t, data=t, op0=nl.abs, operand0=0.0, reduce_op=nl.add, reduce_res=s, reduce_cmd=cmd)


@breaks(rules.NOT_MODELLED, "select_reduce", "reduce_res")
def reducing_select() -> None:
    t, mask = tile((P, 4)), tile((P, 4), nl.uint8)
    nisa.select_reduce(dst=t, predicate=mask, on_true=t, on_false=0.0, reduce_res=empty((P, 1)))


@breaks(rules.SAME_SHAPE, "tensor_scalar_reduce", "reduce_res")
def wide_reduction_result() -> None:
    t = tile((P, 4))
    nisa.tensor_scalar_reduce(dst=t, data=t, op0=nl.abs, operand0=0.0, reduce_op=nl.add, reduce_res=empty((P, 2)))


@breaks(rules.SAME_SHAPE, "activation", "reduce_res")
def wide_activation_sum() -> None:
    t, cmd = tile((P, 4)), nisa.reduce_cmd.reset_reduce
    nisa.activation(dst=t, op=nl.copy, data=t, reduce_op=nl.add, reduce_res=empty((P, 2)), reduce_cmd=cmd)


@breaks(rules.ENUMS, "activation", "reduce_cmd")
def command_as_string() -> None:
    nisa.activation(dst=tile((P, 4)), op=nl.copy, data=tile((P, 4)), reduce_cmd="reset")


@breaks(rules.REDUCE_CMD, "activation", "reduce_cmd")
def command_of_another_engine() -> None:
    nisa.activation(dst=tile((P, 4)), op=nl.copy, data=tile((P, 4)), reduce_cmd=nisa.reduce_cmd.load_reduce)


@breaks(rules.BITVEC, "tensor_reduce", "data")
def negated_bit_reduction() -> None:
    t = tile((P, 4), nl.int32)
    nisa.tensor_reduce(dst=empty((P, 1), nl.int32), op=nl.bitwise_or, data=t, axis=1, negate=True)


@breaks(rules.DMA_MODE, "dma_copy", "oob_mode")
def skipping_dma() -> None:
    nisa.dma_copy(dst=empty((P, 4)), src=tile((P, 4)), oob_mode=nisa.oob_mode.skip)


@breaks(rules.NOT_MODELLED, "dma_transpose", "dge_mode")
def hardware_dma_transpose() -> None:
    source = tile((16, P), nl.bfloat16)
    nisa.dma_transpose(dst=empty((P, 16), nl.bfloat16), src=source, dge_mode=nisa.dge_mode.hwdge)


@breaks(rules.MAX8, "max8", "src")
def seven_elements_to_search() -> None:
    nisa.max8(dst=empty((P, 8)), src=tile((P, 7)))


@breaks(rules.MAX8, "max8", "dst")
def nine_largest() -> None:
    nisa.max8(dst=empty((P, 9)), src=tile((P, 16)))


@breaks(rules.MAX8, "max8", "src")
def largest_of_nan() -> None:
    nisa.max8(dst=empty((P, 8)), src=tile((P, 16), value=float("nan")))


@breaks(rules.MAX8, "nc_find_index8", "vals")
def value_that_is_not_there() -> None:
    nisa.nc_find_index8(dst=empty((P, 8), nl.uint32), data=tile((P, 16)), vals=tile((P, 8), value=2.0))


@breaks(rules.MAX8, "nc_match_replace8", "dst_idx")
def signed_places() -> None:
    same = tile((P, 16)), tile((P, 8))
    nisa.nc_match_replace8(dst=empty((P, 16)), data=same[0], vals=same[1], imm=0.0, dst_idx=empty((P, 8), nl.int32))


@breaks(rules.BN_SIZE, "bn_stats", "data")
def statistics_of_513_elements() -> None:
    nisa.bn_stats(dst=empty((P, 6)), data=tile((P, 513)))


@breaks(rules.BN_SIZE, "bn_aggr", "data")
def aggregation_of_four_elements() -> None:
    nisa.bn_aggr(dst=empty((P, 2)), data=tile((P, 4)))


@breaks(rules.LOCAL_GATHER, "local_gather", "index")
def gather_by_signed_indices() -> None:
    nisa.local_gather(dst=empty((P, 16)), src_buffer=tile((P, 4)), index=tile((P, 1), nl.int16))


@breaks(rules.LOCAL_GATHER, "local_gather", "dst")
def gather_into_too_little() -> None:
    nisa.local_gather(dst=empty((P, 15)), src_buffer=tile((P, 4)), index=tile((P, 1), nl.uint16))


@breaks(rules.OP_CLASS, "range_select", "comp_op0")
def range_by_addition() -> None:
    t, bound = tile((P, 8)), tile((P, 1))
    nisa.range_select(dst=t, on_true_tile=t, comp_op0=nl.add, comp_op1=nl.less, bound0=bound, bound1=bound)


@breaks(rules.OP_CLASS, "tensor_tensor_scan", "op1")
def scan_of_bits() -> None:
    t = tile((P, 8))
    nisa.tensor_tensor_scan(dst=t, data0=t, data1=t, initial=0.0, op0=nl.add, op1=nl.bitwise_and)

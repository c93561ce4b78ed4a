"""Names, values and element types."""

from __future__ import annotations

import numpy as np
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator import rules

from tests.emulator.broken_rules import breaks, breaks_launch
from tests.emulator.support import P, empty, execute, tile


@breaks(rules.NOT_MODELLED, "nisa.rand2")
def unlisted_instruction() -> None:
    nisa.rand2(dst=tile((P, 6)))


@breaks(rules.NOT_MODELLED, "nl.load")
def deprecated_load() -> None:
    nl.load(tile((P, 4)))


@breaks(rules.NOT_MODELLED, "nl.add")
def nl_function_call() -> None:
    nl.add(tile((P, 4)), tile((P, 4)))


@breaks(rules.ENGINE, "tensor_tensor", "engine")
def power_on_the_vector_engine() -> None:
    t = tile((P, 4))
    nisa.tensor_tensor(dst=t, data1=t, data2=t, op=nl.power, engine=nisa.engine.vector)


@breaks(rules.NOT_MODELLED, "tensor.rearrange")
def unlisted_view() -> None:
    tile((P, 4)).rearrange(("p", "f"), ("p", "f"))


@breaks(rules.TRN2_ONLY, "nisa.nc_matmul_mx")
def mx_matmul() -> None:
    nisa.nc_matmul_mx(dst=None, stationary=None, moving=None)


@breaks(rules.TRN2_ONLY, "nl.ndarray", "dtype")
def fn_tile() -> None:
    empty((P, 4), nl.float8_e4m3fn)


@breaks(rules.TRN2_ONLY, "tensor_scalar", "op0")
def square_as_alu_operator() -> None:
    nisa.tensor_scalar(dst=tile((P, 4)), data=tile((P, 4)), op0=nl.square, operand0=None)


@breaks(rules.TRN2_ONLY, "tensor.view")
def view_as_e8m0() -> None:
    tile((P, 4), nl.uint8).view(nl.float8_e8m0fnu)


@breaks(rules.NO_DIVIDE, "tensor_tensor", "op")
def divide() -> None:
    nisa.tensor_tensor(dst=tile((P, 4)), data1=tile((P, 4)), data2=tile((P, 4)), op=nl.divide)


@breaks(rules.OPERAND_KIND, "tensor_copy", "src")
def number_as_tensor() -> None:
    nisa.tensor_copy(dst=tile((P, 4)), src=3.0)


@breaks(rules.OPERAND_KIND, "tensor_scalar", "operand1")
def operand_without_operator() -> None:
    nisa.tensor_scalar(dst=tile((P, 4)), data=tile((P, 4)), op0=nl.add, operand0=1.0, operand1=2.0)


@breaks(rules.ENUMS, "memset", "engine")
def engine_as_string() -> None:
    nisa.memset(dst=tile((P, 4)), value=0.0, engine="vector")


@breaks(rules.ENUMS, "nl.ndarray", "buffer")
def buffer_as_string() -> None:
    nl.ndarray((P, 4), dtype=nl.float32, buffer="sbuf")


@breaks(rules.ENUMS, "dma_copy", "dge_mode")
def mode_as_int() -> None:
    nisa.dma_copy(dst=empty((P, 4)), src=tile((P, 4)), dge_mode=1)


@breaks(rules.NO_OPERATORS, "tensor")
def truth_of_a_tensor() -> None:
    if tile((1, 1)):
        pass


@breaks(rules.NO_OPERATORS, "tensor")
def sum_of_tensors() -> None:
    tile((P, 4)) + 1.0


@breaks(rules.NO_OPERATORS, "tensor")
def assignment_to_a_slice() -> None:
    tile((P, 4))[:, 0:1] = 1.0


@breaks(rules.NO_OPERATORS, "register")
def arithmetic_on_a_register() -> None:
    nisa.register_alloc(1) + 1


@breaks(rules.NO_OPERATORS, "register")
def register_as_a_condition() -> None:
    while nisa.register_alloc(1):
        pass


@breaks(rules.DTYPE, "nl.ndarray", "dtype")
def dtype_as_string() -> None:
    nl.ndarray((P, 4), dtype="float32", buffer=nl.sbuf)


@breaks(rules.DTYPE, "select_reduce", "on_true")
def select_int32() -> None:
    words, mask = tile((P, 4), nl.int32), tile((P, 4), nl.uint8)
    nisa.select_reduce(dst=empty((P, 4), nl.int32), predicate=mask, on_true=words, on_false=0.0)


@breaks_launch(rules.DTYPE, "kernel", "a")
def int64_argument() -> None:
    execute(lambda a: None, np.zeros((2, 2), np.int64))


@breaks(rules.DTYPE_MATCH, "tensor_copy_predicated", "src")
def predicated_cast() -> None:
    mask = tile((P, 4), nl.uint8)
    nisa.tensor_copy_predicated(dst=tile((P, 4)), src=tile((P, 4), nl.bfloat16), predicate=mask)

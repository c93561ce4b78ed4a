"""tensor_reduce on VectorE, activation and its accumulator registers on ScalarE."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from .. import hardware, rules
from ..call import Call, Engine, free_elements
from ..numeric import F32, constant_f32, flush, tree_reduce
from ..operators import (
    ACTIVATIONS,
    BITVEC,
    BITVEC_REDUCED_TYPES,
    BITVEC_REDUCING,
    LOGICAL_REDUCING,
    REDUCING,
    Activation,
    alu_name,
    is_bitvec,
    op_name,
)
from ..tensor import Tensor
from .elementwise import apply, scalar_operand


class ReduceCmd(Enum):
    """nisa.reduce_cmd."""

    idle = "idle"
    reset = "reset"
    reduce = "reduce"
    reset_reduce = "reset_reduce"
    load_reduce = "load_reduce"


_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "logical_and": np.minimum, "logical_or": np.maximum, "logical_xor": np.not_equal,
}  # fmt: skip


def reduce_f32(alu: str, values: F32, axes: tuple[int, ...]) -> F32:
    """fp32 reduction over the last axes (subtract: the first element less all others).

    Its order depends on the number of elements alone, not on how many rows are reduced nor on where they lie.
    """
    flat = values.reshape((*values.shape[: axes[0]], -1))
    if alu in LOGICAL_REDUCING:
        flat = (flat != 0).astype(np.float32)
    if alu == "subtract":
        first, others = flat[..., 0], flat[..., 1:]
        return first - tree_reduce(np.add, others) if others.shape[-1] else first
    return tree_reduce(_UFUNCS[alu], flat)


def tensor_reduce(
    dst: Any, op: Any, data: Any, axis: Any, negate: bool = False, keepdims: bool = False, name: str | None = None
) -> None:
    """dst = reduction of data over its trailing free axes, times -1 if `negate`."""
    call = Call("tensor_reduce")
    source, out = call.source("data", data), call.destination("dst", dst)
    call.check_geometry(free_dims=hardware.MAX_REDUCED_DIMS, overlap=True)
    alu = alu_name(call.op, "op", op)
    if alu not in REDUCING and alu not in BITVEC_REDUCING:
        call.refuse(rules.REDUCE_OP, "op", f"nl.{alu}")
    axes = _axes(call, axis, source.ndim)
    kept = source.shape[: axes[0]] + ((1,) * len(axes) if keepdims else ())
    allowed = {kept, (*kept, 1)} if axes[0] == 1 and not keepdims else {kept}
    if out.shape not in allowed:
        call.refuse(rules.SAME_SHAPE, "dst", f"shape {out.shape}, expected {kept}")
    if alu in BITVEC_REDUCING:
        if negate or source.dtype.name not in BITVEC_REDUCED_TYPES or source.dtype != out.dtype:
            call.refuse(rules.BITVEC, "data", f"{source.dtype} to {out.dtype}, negate={negate}")
        if call.options.arithmetic:
            ufunc: Any = BITVEC[alu]
            out.array()[...] = ufunc.reduce(source.array().reshape((*source.shape[: axes[0]], -1)), axis=-1).reshape(
                out.shape
            )
    elif call.options.arithmetic:
        with np.errstate(all="ignore"):
            result = reduce_f32(alu, call.f32("data", source), axes)
            call.store("dst", out, -result if negate else result)
    call.finish(Engine.vector, free_elements(source), alu=alu)


def _axes(call: Call, axis: Any, rank: int) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    expected = tuple(range(rank - len(axes), rank))
    if not axes or axes != expected or axes[0] < 1:
        call.refuse(rules.REDUCE_AXES, "axis", f"{axis} of {rank} dimensions")
    return axes


def tensor_scalar_reduce(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any = None,
    reverse0: bool = False,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reduce_init: None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> None:
    """dst = data op0 operand0, and reduce_res = its fp32 reduction over all free elements, negated if asked."""
    call = Call("tensor_scalar_reduce")
    source, out = call.source("data", data), call.destination("dst", dst)
    alu, reduction = alu_name(call.op, "op0", op0), alu_name(call.op, "reduce_op", reduce_op)
    if is_bitvec(alu) or alu == "rsqrt":
        call.refuse(rules.OP_CLASS, "op0", f"nl.{alu}")
    if reduction not in ("add", "multiply", "maximum", "minimum"):
        call.refuse(rules.REDUCE_OP, "reduce_op", f"nl.{reduction}")
    if reverse0 or reduce_cmd is not ReduceCmd.reset_reduce or reduce_init is not None:
        call.refuse(rules.NOT_MODELLED, "reduce_cmd", "only reset_reduce, without reverse0 and reduce_init")
    value = scalar_operand(call, "operand0", alu, operand0, source)
    result = None if reduce_res is None else call.destination("reduce_res", reduce_res)
    if result is not None and result.shape != (source.shape[0], 1):
        call.refuse(rules.SAME_SHAPE, "reduce_res", f"shape {result.shape}, expected {(source.shape[0], 1)}")
    call.check_geometry()
    call.same_size(out, ("data", source))
    if call.options.arithmetic:
        with np.errstate(all="ignore"):
            values = np.asarray(apply(call, alu, call.f32("data", source), value, False, source.ndim), np.float32)
            call.store("dst", out, values)
            if result is not None:
                total = reduce_f32(reduction, values, tuple(range(1, values.ndim)))
                call.store("reduce_res", result, -total if reduce_res_negate else total)
    call.finish(Engine.vector, free_elements(source), alu=alu, alu1=reduction)


def activation(
    dst: Any,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = ReduceCmd.idle,
    name: str | None = None,
) -> None:
    """dst = op(data * scale + bias) on ScalarE, with an optional sum over the free elements."""
    call = Call("activation")
    source, out = call.source("data", data), call.destination("dst", dst, discarded=reduce_res is not None)
    function = _function(call, op)
    factor = _scale(call, scale, source)
    shift = _bias(call, bias, source)
    result = _reduction(call, source, reduce_op, reduce_res, reduce_cmd)
    call.check_geometry()
    call.same_size(out, ("data", source))
    if call.options.arithmetic:
        with np.errstate(all="ignore"):
            values = _activate(call, function, source, factor, shift)
            call.store("dst", out, values)
            sums = _accumulate(call, source, values, reduce_cmd)
            if result is not None:
                call.store("reduce_res", result, sums)
    call.finish(Engine.scalar, free_elements(source), function=op.name, reads_out=result is not None)


def activation_reduce(
    dst: Any,
    op: Any,
    data: Any,
    reduce_op: Any,
    reduce_res: Any,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> None:
    """activation with reduce_cmd=reset_reduce."""
    activation(dst, op, data, bias, scale, reduce_op, reduce_res, ReduceCmd.reset_reduce)


def _function(call: Call, op: Any) -> Activation:
    name = op_name(call.op, "op", op)
    if name not in ACTIVATIONS:
        call.refuse(rules.ACTIVATION, "op", f"nl.{name}")
    call.program.activations.add(name)
    if len(call.program.activations) > hardware.MAX_ACTIVATION_FUNCTIONS:
        call.refuse(rules.ACTIVATION_COUNT, "op", ", ".join(sorted(call.program.activations)))
    return ACTIVATIONS[name]


def _scale(call: Call, scale: Any, data: Tensor) -> Tensor | np.float32:
    if isinstance(scale, Tensor):
        return call.per_partition("scale", scale, data)
    return constant_f32(scale, call.op, "scale")


def _bias(call: Call, bias: Any, data: Tensor) -> Tensor | np.float32:
    if isinstance(bias, Tensor):
        return call.per_partition("bias", bias, data, any_dtype=True)
    return constant_f32(0.0 if bias is None else bias, call.op, "bias")


def _reduction(call: Call, data: Tensor, reduce_op: Any, reduce_res: Any, cmd: Any) -> Tensor | None:
    if not isinstance(cmd, ReduceCmd):
        call.refuse(rules.ENUMS, "reduce_cmd", f"{cmd!r}")
    sums = cmd in (ReduceCmd.reduce, ReduceCmd.reset_reduce)
    if cmd is ReduceCmd.load_reduce:
        call.refuse(rules.REDUCE_CMD, "reduce_cmd", "load_reduce is VectorE's")
    if sums and (reduce_op is None or op_name(call.op, "reduce_op", reduce_op) != "add"):
        call.refuse(rules.REDUCE_CMD, "reduce_op", f"{reduce_op!r}: nl.add")
    if not sums and (reduce_op is not None or reduce_res is not None):
        call.refuse(rules.REDUCE_CMD, "reduce_res", f"with reduce_cmd {cmd.value}")
    _check_started(call, data, cmd)
    if reduce_res is None:
        return None
    result = call.destination("reduce_res", reduce_res)
    if result.shape != (data.shape[0], 1):
        call.refuse(rules.SAME_SHAPE, "reduce_res", f"shape {result.shape}, expected {(data.shape[0], 1)}")
    return result


def _check_started(call: Call, data: Tensor, cmd: ReduceCmd) -> None:
    """The registers that `reduce` adds to were reset before."""
    mine = set(range(data.partition, data.partition + data.shape[0]))
    if cmd in (ReduceCmd.reset, ReduceCmd.reset_reduce):
        call.program.reset_lanes |= mine
    elif cmd is ReduceCmd.reduce and not mine <= call.program.reset_lanes:
        call.refuse(rules.REDUCE_CMD, "reduce_cmd", "reduce on registers that were never reset")


def _activate(call: Call, function: Activation, source: Tensor, scale: Any, bias: Any) -> F32:
    column = (-1,) + (1,) * (source.ndim - 1)
    factor = call.f32("scale", scale).reshape(column) if isinstance(scale, Tensor) else scale
    shift = call.f32("bias", bias).reshape(column) if isinstance(bias, Tensor) else bias
    scaled = flush(np.asarray(call.f32("data", source) * factor, np.float32), call.options)
    values = flush(np.asarray(scaled + shift, np.float32), call.options)
    checked = np.abs(values) if function.both_signs else values
    outside = ~((checked >= function.low) & (checked <= function.high)) & ~np.isnan(checked)
    if outside.any():
        found = f"input {float(values[outside].flat[0])!r}, valid {function.low!r} to {function.high!r}"
        call.refuse(rules.ACTIVATION_RANGE, "data", found)
    return flush(function.function(values), call.options)


def _accumulate(call: Call, source: Tensor, values: F32, cmd: ReduceCmd) -> F32:
    """The accumulator registers of this instruction's partitions after it: one sum each."""
    mine = call.program.accumulators[source.partition : source.partition + source.shape[0]]
    if cmd in (ReduceCmd.reset, ReduceCmd.reset_reduce):
        mine[...] = 0
    if cmd in (ReduceCmd.reduce, ReduceCmd.reset_reduce):
        mine += reduce_f32("add", values.reshape(len(mine), -1), (1,))[:, None]
    return mine

"""tensor_tensor, tensor_scalar, scalar_tensor_tensor, reciprocal."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import rules
from ..call import Call, Engine, free_elements
from ..dtypes import DType
from ..memory import Buffer
from ..numeric import Array, constant_f32, constant_int, flush
from ..operators import ARITHMETIC, BITVEC, SHIFTS, UNARY, alu_name, is_bitvec
from ..tensor import Tensor

_WORDS = ("int32", "uint32")


def tensor_tensor(
    dst: Any, data1: Any, data2: Any, op: Any, engine: Any = Engine.unknown, name: str | None = None
) -> None:
    """dst = data1 op data2."""
    call = Call("tensor_tensor")
    a, b = call.source("data1", data1), call.source("data2", data2)
    out = call.destination("dst", dst)
    call.check_geometry()
    call.same_size(out, ("data1", a), ("data2", b))
    call.not_both_psum(("data1", a), ("data2", b))
    alu = alu_name(call.op, "op", op)
    if alu in UNARY or alu == "invert":
        call.refuse(rules.OP_CLASS, "op", f"nl.{alu} takes one operand")
    native = all(t.dtype.name in _WORDS for t in (a, b, out)) and not is_bitvec(alu) and alu != "power"
    in_sbuf = all(t.buffer is Buffer.sbuf for t in (a, b, out))
    allowed = (Engine.vector,) if is_bitvec(alu) else (Engine.vector, Engine.gpsimd)
    allowed = (Engine.gpsimd,) if alu == "power" else allowed
    chosen = call.engine(engine, allowed, Engine.gpsimd if (native and in_sbuf) or alu == "power" else Engine.vector)
    if is_bitvec(alu):
        _check_bitvec(call, ("dst", out.dtype), ("data1", a.dtype), ("data2", b.dtype))
    if call.options.arithmetic:
        _tensor_tensor_values(call, alu, out, a, b, native and chosen is Engine.gpsimd)
    call.finish(chosen, free_elements(out), alu=alu)


def _tensor_tensor_values(call: Call, alu: str, out: Tensor, a: Tensor, b: Tensor, native: bool) -> None:
    with np.errstate(all="ignore"):
        if is_bitvec(alu):
            _check_shift(call, alu, b.array(), b.dtype)
            out.array()[...] = BITVEC[alu](a.array().reshape(out.shape), b.array().reshape(out.shape))
        elif native:
            pair = (t.array().astype(np.int64).reshape(out.shape) for t in (a, b))
            out.array()[...] = (
                (ARITHMETIC[alu](*pair).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(out.dtype.numpy)
            )
        else:
            left, right = call.f32("data1", a).reshape(out.shape), call.f32("data2", b).reshape(out.shape)
            call.store("dst", out, ARITHMETIC[alu](left, right))


def tensor_scalar(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1, operands broadcast along the free dimensions."""
    call = Call("tensor_scalar")
    source, out = call.source("data", data), call.destination("dst", dst)
    alu0 = alu_name(call.op, "op0", op0)
    alu1 = "" if op1 is None else alu_name(call.op, "op1", op1)
    if op1 is None and operand1 is not None:
        call.refuse(rules.OPERAND_KIND, "operand1", "given without op1")
    if alu1 and is_bitvec(alu0) != is_bitvec(alu1):
        call.refuse(rules.OP_CLASS, "op1", f"nl.{alu0} with nl.{alu1}")
    value0 = scalar_operand(call, "operand0", alu0, operand0, source)
    value1 = scalar_operand(call, "operand1", alu1, operand1, source) if alu1 else None
    call.check_geometry()
    call.same_size(out, ("data", source))
    if is_bitvec(alu0):
        _check_bitvec(call, ("dst", out.dtype), ("data", source.dtype))
    chosen = _tensor_scalar_engine(call, alu0, alu1, engine)
    if call.options.arithmetic:
        steps = [(alu0, value0, reverse0), (alu1, value1, reverse1)]
        _tensor_scalar_values(call, source, out, [step for step in steps if step[0]])
    call.finish(chosen, free_elements(out), alu=alu0, alu1=alu1)


def _tensor_scalar_engine(call: Call, alu0: str, alu1: str, engine: Any) -> Engine:
    if "power" in (alu0, alu1) or (alu0 == "rsqrt" and not alu1):
        return call.engine(engine, (Engine.gpsimd,), Engine.gpsimd)
    if "rsqrt" in (alu0, alu1):
        call.refuse(rules.ENGINE, "op0", "nl.rsqrt runs on GpSimd, alone")
    scalar = (alu0, alu1) in (("multiply", "add"), ("multiply", ""), ("add", ""))
    return call.engine(engine, (Engine.vector, Engine.scalar) if scalar else (Engine.vector,), Engine.vector)


def scalar_operand(
    call: Call, role: str, alu: str, value: Any, data: Tensor, *, any_dtype: bool = False
) -> Tensor | Array | np.float32 | None:
    """A checked operand: a tile, a constant, or None for a unary operator."""
    if alu in UNARY or alu == "invert":
        if isinstance(value, Tensor) or value not in (None, 0):
            call.refuse(rules.UNARY, role, f"{value!r} for nl.{alu}")
        return None
    if is_bitvec(alu):
        if not data.dtype.is_int:
            call.refuse(rules.BITVEC, "data", f"{data.dtype} for nl.{alu}")
        if isinstance(value, Tensor):
            tile = call.source(role, value)
            if tile.shape != (data.shape[0], 1) or tile.dtype != data.dtype:
                call.refuse(rules.SCALAR_OPERAND, role, f"{tile.dtype} {tile.shape} for {data.dtype} data")
            return tile
        constant = constant_int(value, data.dtype, call.op, role)
        _check_shift(call, alu, constant, data.dtype)
        return constant
    if isinstance(value, Tensor):
        return call.per_partition(role, value, data, any_dtype=any_dtype)
    return constant_f32(value, call.op, role)


def _tensor_scalar_values(call: Call, data: Tensor, out: Tensor, steps: list[tuple[str, Any, bool]]) -> None:
    bitvec = is_bitvec(steps[0][0])
    result: Any = data.array() if bitvec else call.f32("data", data)
    with np.errstate(all="ignore"):
        for alu, operand, reverse in steps:
            result = apply(call, alu, result, operand, reverse, data.ndim)
    if bitvec:
        out.array()[...] = result.reshape(out.shape)
    else:
        call.store("dst", out, result)


def apply(call: Call, alu: str, left: Any, operand: Any, reverse: bool, rank: int) -> Any:
    """One operator on fp32 values (or integers, for bitvec) and a constant or per-partition operand."""
    if alu == "invert":
        return np.invert(left)
    if is_bitvec(alu):
        if isinstance(operand, Tensor):
            operand = operand.array().reshape((-1,) + (1,) * (rank - 1))
            _check_shift(call, alu, operand, DType(str(operand.dtype), "int", operand.dtype))
        right = np.broadcast_to(operand, left.shape)
        return BITVEC[alu](right, left) if reverse else BITVEC[alu](left, right)
    if alu in UNARY:
        return flush(UNARY[alu](left), call.options)
    right = operand
    if isinstance(operand, Tensor):
        right = call.f32("operand", operand).reshape((-1,) + (1,) * (rank - 1))
    result = ARITHMETIC[alu](right, left) if reverse else ARITHMETIC[alu](left, right)
    return flush(np.asarray(result, np.float32), call.options)


def scalar_tensor_tensor(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1, operand0 per partition or constant, operand1 a whole tile."""
    call = Call("scalar_tensor_tensor")
    source, tile = call.source("data", data), call.source("operand1", operand1)
    out = call.destination("dst", dst)
    names = alu_name(call.op, "op0", op0), alu_name(call.op, "op1", op1)
    for role, alu in zip(("op0", "op1"), names, strict=True):
        if alu not in ARITHMETIC:
            call.refuse(rules.OP_CLASS, role, f"nl.{alu}: binary arithmetic only")
    value = scalar_operand(call, "operand0", names[0], operand0, source, any_dtype=True)
    call.check_geometry()
    call.same_size(out, ("data", source), ("operand1", tile))
    call.not_both_psum(("data", source), ("operand1", tile))
    if call.options.arithmetic:
        with np.errstate(all="ignore"):
            first = apply(call, names[0], call.f32("data", source), value, reverse0, source.ndim)
            second = call.f32("operand1", tile).reshape(first.shape)
            pair = (second, first) if reverse1 else (first, second)
            call.store("dst", out, ARITHMETIC[names[1]](*pair))
    call.finish(Engine.vector, free_elements(out), alu=names[0], alu1=names[1])


def reciprocal(dst: Any, data: Any, name: str | None = None) -> None:
    """dst = 1 / data, on VectorE."""
    call = Call("reciprocal")
    source, out = call.source("data", data), call.destination("dst", dst)
    call.check_geometry()
    call.same_size(out, ("data", source))
    if call.options.arithmetic:
        with np.errstate(all="ignore"):
            call.store("dst", out, np.reciprocal(call.f32("data", source)))
    call.finish(Engine.vector, free_elements(out))


def _check_bitvec(call: Call, *operands: tuple[str, DType]) -> None:
    """Integers of one type on both sides."""
    first = operands[0][1]
    for role, dtype in operands:
        if not dtype.is_int or dtype != first:
            call.refuse(rules.BITVEC, role, f"{dtype} with {first}")


def _check_shift(call: Call, alu: str, amount: Array, dtype: DType) -> None:
    if alu in SHIFTS and (int(amount.min()) < 0 or int(amount.max()) >= 8 * dtype.itemsize):
        call.refuse(rules.CONSTANT, "shift", f"{int(amount.min())}..{int(amount.max())} for {dtype}")

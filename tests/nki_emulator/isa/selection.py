"""Instructions that pick or generate elements: predicated copy, select, shuffle, iota, affine_select."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import geometry, hardware, rules
from ..call import Call, Engine, free_elements, same_dtype
from ..memory import Buffer
from ..numeric import F32, Array, constant_f32, to_dtype
from ..operators import ARITHMETIC, alu_name
from ..tensor import Tensor
from .movement import exact_constant
from .reduction import ReduceCmd

FP32_MIN = float(np.finfo(np.float32).min)
_GROUP = 16
"""Partitions of one GpSimd core."""
_COMPARISONS = ("equal", "not_equal", "greater_equal", "greater", "less_equal", "less")


def tensor_copy_predicated(
    dst: Any, src: Any, predicate: Any, reverse_pred: bool = False, name: str | None = None
) -> None:
    """dst = src where predicate is not 0 (is 0, if reversed); bits."""
    call = Call("tensor_copy_predicated")
    mask, out = call.source("predicate", predicate), call.destination("dst", dst)
    source = call.source("src", src) if isinstance(src, Tensor) else None
    call.require_written("dst", out)
    call.check_geometry()
    call.same_size(out, ("predicate", mask))
    if source is not None:
        call.same_size(out, ("src", source))
        call.not_both_psum(("src", source), ("predicate", mask))
        same_dtype(call, "src", source.dtype, out.dtype)
    if mask.dtype.name not in ("uint8", "uint16", "uint32"):
        call.refuse(rules.PREDICATE, "predicate", f"{mask.dtype}, must be uint8, uint16 or uint32")
    if call.options.arithmetic:
        chosen = ((mask.array() == 0) if reverse_pred else (mask.array() != 0)).reshape(out.shape)
        if source is not None:
            _bits(out)[chosen] = _bits(source).reshape(out.shape)[chosen]
        else:
            out.array()[chosen] = exact_constant(call, src, out.dtype)
    call.finish(Engine.vector, free_elements(out))


def select_reduce(
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: None = None,
    reduce_cmd: Any = ReduceCmd.idle,
    reduce_op: Any = None,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = on_true where predicate, else on_false (a constant or one value a partition). Without its reduction."""
    call = Call("select_reduce")
    if reduce_res is not None or reduce_cmd is not ReduceCmd.idle or reduce_op is not None:
        call.refuse(rules.NOT_MODELLED, "reduce_res", "the reduction of select_reduce")
    mask, source = call.source("predicate", predicate), call.source("on_true", on_true)
    other = call.per_partition("on_false", on_false, source) if isinstance(on_false, Tensor) else None
    out = call.destination("dst", dst)
    call.check_geometry()
    call.same_size(out, ("predicate", mask), ("on_true", source))
    call.not_both_psum(("on_true", source), ("predicate", mask))
    if mask.dtype.name not in ("int8", "uint8", "int16", "uint16"):
        call.refuse(rules.PREDICATE, "predicate", f"{mask.dtype}, must be an 8- or 16-bit integer")
    if source.dtype.name in ("int32", "uint32"):
        call.refuse(rules.DTYPE, "on_true", f"{source.dtype}")
    constant = np.asarray(0.0 if other is not None else constant_f32(on_false, call.op, "on_false"), np.float32)
    if call.options.arithmetic:
        column = constant if other is None else call.f32("on_false", other).reshape((-1,) + (1,) * (out.ndim - 1))
        chosen = ((mask.array() == 0) if reverse_pred else (mask.array() != 0)).reshape(out.shape)
        true = call.f32("on_true", source).reshape(out.shape)
        call.store("dst", out, np.where(chosen, true, column).astype(np.float32, copy=False))
    call.finish(Engine.vector, free_elements(out))


def range_select(
    dst: Any,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = None,
    range_start: float = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where (index + range_start) compares true with both bounds, else the least fp32 number.

    reduce_res takes the largest element of each partition.
    """
    call = Call("range_select")
    source, out = call.source("on_true_tile", on_true_tile), call.destination("dst", dst)
    bounds = [call.per_partition(role, b, source) for role, b in (("bound0", bound0), ("bound1", bound1))]
    names = alu_name(call.op, "comp_op0", comp_op0), alu_name(call.op, "comp_op1", comp_op1)
    if any(compare not in _COMPARISONS for compare in names):
        call.refuse(rules.OP_CLASS, "comp_op0", f"{names} are no comparisons")
    largest = reduce_op is None or alu_name(call.op, "reduce_op", reduce_op) == "maximum"
    if not largest or reduce_cmd is not ReduceCmd.reset_reduce or np.float32(on_false_value) != np.float32(FP32_MIN):
        call.refuse(rules.NOT_MODELLED, "reduce_op", "only nl.maximum, reset_reduce and the least fp32 number")
    result = None if reduce_res is None else call.destination("reduce_res", reduce_res)
    call.check_geometry()
    call.same_size(out, ("on_true_tile", source))
    if call.options.arithmetic:
        index = np.float32(range_start) + np.arange(free_elements(source), dtype=np.float32)[None, :]
        pairs = zip(names, bounds, strict=True)
        inside = np.logical_and(*(ARITHMETIC[compare](index, call.f32("bound", b)) != 0 for compare, b in pairs))
        values = np.where(inside, call.f32("on_true_tile", source).reshape(inside.shape), np.float32(FP32_MIN))
        with np.errstate(over="ignore"):
            call.store("dst", out, values)
            if result is not None:
                call.store("reduce_res", result, values.max(axis=1))
    call.finish(Engine.vector, free_elements(source))


def local_gather(
    dst: Any,
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> None:
    """In each group of 16 partitions, take the runs of src_buffer that the group's indices name, on GpSimd.

    A group's indices count down its partitions first; every partition of the group takes the same places.
    """
    call = Call("local_gather")
    source, places = call.source("src_buffer", src_buffer, (Buffer.sbuf,)), call.source("index", index, (Buffer.sbuf,))
    out = call.destination("dst", dst, (Buffer.sbuf,))
    call.check_geometry(free_dims=hardware.MAX_REDUCED_DIMS)
    call.engine(Engine.gpsimd, (Engine.gpsimd,), Engine.gpsimd)
    partitions, held = source.shape[0], _GROUP * free_elements(places)
    count = held if num_valid_indices is None else num_valid_indices
    same = partitions == places.shape[0] == out.shape[0] and partitions % _GROUP == 0 and source.dtype == out.dtype
    if not same or places.dtype.name != "uint16" or not 1 <= count <= held:
        call.refuse(rules.LOCAL_GATHER, "index", f"{places.dtype} {places.shape} for {source.dtype} {source.shape}")
    if free_elements(out) != count * num_elem_per_idx or free_elements(source) % num_elem_per_idx:
        call.refuse(rules.LOCAL_GATHER, "dst", f"{out.shape} for {count} runs of {num_elem_per_idx}")
    if call.options.arithmetic:
        runs = _bits(source).reshape(partitions, -1, num_elem_per_idx)
        chosen = places.array().reshape(partitions // _GROUP, _GROUP, -1).swapaxes(1, 2).reshape(-1, held)[:, :count]
        if chosen.max() >= runs.shape[1]:
            call.refuse(rules.LOCAL_GATHER, "index", f"{chosen.max()} of {runs.shape[1]} runs")
        rows = np.repeat(chosen, _GROUP, axis=0).astype(np.int64)
        _bits(out)[...] = runs[np.arange(partitions)[:, None], rows].reshape(out.shape)
    call.finish(Engine.gpsimd, free_elements(out))


def nc_stream_shuffle(dst: Any, src: Any, shuffle_mask: Sequence[int], name: str | None = None) -> None:
    """In each quadrant of 32 partitions, dst partition i takes src partition shuffle_mask[i]; 255 leaves it."""
    call = Call("nc_stream_shuffle")
    source, out = call.source("src", src), call.destination("dst", dst)
    call.check_geometry(overlap=True)
    if free_elements(source) != free_elements(out):
        call.refuse(rules.SAME_SHAPE, "src", f"shape {source.shape}, expected {out.shape}")
    same_dtype(call, "src", source.dtype, out.dtype)
    mask = list(shuffle_mask)
    if len(mask) != hardware.QUADRANT or any(type(m) is not int or not (0 <= m < 32 or m == 255) for m in mask):
        call.refuse(rules.SHUFFLE_MASK, "shuffle_mask", f"{mask}")
    count = out.shape[0]
    rows = [(row, row // 32 * 32 + mask[row % 32]) for row in range(count) if mask[row % 32] != 255]
    if any(origin >= source.shape[0] for _, origin in rows):
        call.refuse(rules.SHUFFLE_MASK, "shuffle_mask", f"reads beyond the {source.shape[0]} partitions of src")
    if len(rows) < count:
        call.require_written("dst", out)
    if call.options.arithmetic and rows:
        to, origin = (np.array(column) for column in zip(*rows, strict=True))
        _bits(out)[to] = _bits(source)[origin].reshape((-1, *out.shape[1:]))
    call.finish(Engine.vector, free_elements(out))


def iota(dst: Any, pattern: Any, offset: int = 0, channel_multiplier: int = 0, name: str | None = None) -> None:
    """dst = offset + partition * channel_multiplier + sum of index * step, in int32."""
    call = Call("iota")
    out = call.destination("dst", dst, (Buffer.sbuf,))
    call.check_geometry()
    call.engine(Engine.gpsimd, (Engine.gpsimd,), Engine.gpsimd)
    values = _affine(call, out, pattern, offset, channel_multiplier)
    if call.options.arithmetic:
        out.array()[...] = _cast_integers(call, values, out)
    call.finish(Engine.gpsimd, free_elements(out))


def affine_select(
    dst: Any,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: Any,
    on_false_value: Any,
    cmp_op: Any = None,
    offset: int = 0,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where the affine value (see iota) compares true with 0, else on_false_value."""
    call = Call("affine_select")
    source, out = (
        call.source("on_true_tile", on_true_tile, (Buffer.sbuf,)),
        call.destination("dst", dst, (Buffer.sbuf,)),
    )
    call.check_geometry()
    call.same_size(out, ("on_true_tile", source))
    call.engine(Engine.gpsimd, (Engine.gpsimd,), Engine.gpsimd)
    compare = "equal" if cmp_op is None else alu_name(call.op, "cmp_op", cmp_op)
    if compare not in _COMPARISONS:
        call.refuse(rules.OP_CLASS, "cmp_op", f"nl.{compare} is no comparison")
    if not isinstance(on_false_value, float):
        call.refuse(rules.CONSTANT, "on_false_value", f"{on_false_value!r} is not a float")
    constant = constant_f32(on_false_value, call.op, "on_false_value")
    affine = _affine(call, out, pattern, offset, channel_multiplier)
    if call.options.arithmetic:
        chosen = ARITHMETIC[compare](affine, 0) != 0
        false = to_dtype(np.asarray(constant), out.dtype, call.options, call.op, "on_false_value")
        if source.dtype == out.dtype:
            true = source.array().reshape(out.shape)
        else:
            values = call.f32("on_true_tile", source).reshape(out.shape)
            true = to_dtype(values, out.dtype, call.options, call.op, "dst")
        out.array()[...] = np.where(chosen, true, false)
    call.finish(Engine.gpsimd, free_elements(out))


def _affine(call: Call, out: Tensor, pattern: Any, offset: int, multiplier: int) -> Array:
    """The affine values of every element of `out`, checked to be int32."""
    pairs = [tuple(pair) for pair in pattern]
    plain = all(len(pair) == 2 and all(type(v) is int for v in pair) for pair in pairs)
    if not plain or not 1 <= len(pairs) <= 4 or geometry.count(tuple(p[1] for p in pairs)) != free_elements(out):
        call.refuse(rules.IOTA_PATTERN, "pattern", f"{pattern} for {free_elements(out)} elements a partition")
    values = np.zeros((1,), np.int64)
    for step, size in pairs:
        values = (values[:, None] + np.arange(size) * step).reshape(-1)
    table = offset + np.arange(out.shape[0])[:, None] * multiplier + values[None, :]
    if table.min() < hardware.INT32_MIN or table.max() > hardware.INT32_MAX:
        call.refuse(rules.IOTA_PATTERN, "pattern", "a value is not an int32")
    return np.asarray(table.reshape(out.shape))


def _cast_integers(call: Call, values: Array, out: Tensor) -> Array:
    if out.dtype.is_int:
        limits = np.iinfo(out.dtype.numpy)
        if values.min() < limits.min or values.max() > limits.max:
            call.refuse(rules.CONSTANT, "dst", f"{values.min()}..{values.max()} does not fit {out.dtype}")
        return np.asarray(values.astype(out.dtype.numpy))
    fp32: F32 = values.astype(np.float32)
    if (fp32.astype(np.int64) != values).any():
        call.refuse(rules.VALUE_INT, "dst", f"{values.min()}..{values.max()} in fp32")
    return to_dtype(fp32, out.dtype, call.options, call.op, "dst")


def _bits(tensor: Tensor) -> Array:
    array: Array = tensor.array().view(np.dtype(f"u{tensor.dtype.itemsize}"))
    return array


__all__ = [
    "affine_select", "iota", "local_gather", "nc_stream_shuffle", "range_select", "select_reduce",
    "tensor_copy_predicated",
]  # fmt: skip

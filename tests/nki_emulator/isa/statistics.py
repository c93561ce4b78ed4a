"""Scans and batch statistics on VectorE: tensor_tensor_scan, bn_stats, bn_aggr."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import hardware, rules
from ..call import Call, Engine, free_elements
from ..numeric import F32, constant_f32, tree_reduce
from ..operators import ARITHMETIC, alu_name
from ..tensor import Tensor

STATISTICS = 3
"""Elements of one group of statistics: count, mean, variance times count."""


def tensor_tensor_scan(
    dst: Any,
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst[:, i] = (data0[:, i] op0 dst[:, i - 1]) op1 data1[:, i], where dst[:, -1] is `initial`."""
    call = Call("tensor_tensor_scan")
    a, b, out = call.source("data0", data0), call.source("data1", data1), call.destination("dst", dst)
    first = call.per_partition("initial", initial, a) if isinstance(initial, Tensor) else None
    start = np.asarray(0.0 if first is not None else constant_f32(initial, call.op, "initial"), np.float32)
    names = alu_name(call.op, "op0", op0), alu_name(call.op, "op1", op1)
    for role, alu in zip(("op0", "op1"), names, strict=True):
        if alu not in ARITHMETIC:
            call.refuse(rules.OP_CLASS, role, f"nl.{alu}: binary arithmetic only")
    call.check_geometry()
    call.same_size(out, ("data0", a), ("data1", b))
    call.not_both_psum(("data0", a), ("data1", b))
    if call.options.arithmetic:
        left, right = (call.f32(role, t).reshape(t.shape[0], -1) for role, t in (("data0", a), ("data1", b)))
        state = np.broadcast_to(start if first is None else call.f32("initial", first)[:, 0], left.shape[:1])
        call.store("dst", out, _scan(left, right, state, names, (reverse0, reverse1)))
    call.finish(Engine.vector, free_elements(out), alu=names[0], alu1=names[1])


def _scan(left: F32, right: F32, state: F32, names: tuple[str, str], reverse: tuple[bool, bool]) -> F32:
    result = np.empty_like(left)
    with np.errstate(all="ignore"):
        for i in range(left.shape[1]):
            pair = (state, left[:, i]) if reverse[0] else (left[:, i], state)
            inner = np.asarray(ARITHMETIC[names[0]](*pair), np.float32)
            pair = (right[:, i], inner) if reverse[1] else (inner, right[:, i])
            state = np.asarray(ARITHMETIC[names[1]](*pair), np.float32)
            result[:, i] = state
    return result


def bn_stats(dst: Any, data: Any, name: str | None = None) -> None:
    """dst [P, 6] = count, mean and variance times count of the elements at even places, then of those at odd places."""
    call = Call("bn_stats")
    source, out = call.source("data", data), call.destination("dst", dst)
    call.check_geometry(free_dims=hardware.MAX_REDUCED_DIMS)
    if free_elements(source) > hardware.BN_STATS_FREE_MAX or free_elements(out) != 2 * STATISTICS:
        call.refuse(rules.BN_SIZE, "data", f"{source.shape} into {out.shape}")
    if call.options.arithmetic:
        values = call.f32("data", source).reshape(source.shape[0], -1)
        halves = [_statistics(values[:, parity::2]) for parity in (0, 1)]
        call.store("dst", out, np.concatenate(halves, axis=1))
    call.finish(Engine.vector, free_elements(source))


def _statistics(values: F32) -> F32:
    count = values.shape[1]
    if count == 0:
        return np.zeros((len(values), STATISTICS), np.float32)
    mean = tree_reduce(np.add, values) / np.float32(count)
    squares = tree_reduce(np.add, np.square(values - mean[:, None]))
    return np.stack([np.full_like(mean, count), mean, squares], axis=1)


def bn_aggr(dst: Any, data: Any, name: str | None = None) -> None:
    """dst [P, 2] = mean and variance of what one or more bn_stats described."""
    call = Call("bn_aggr")
    source, out = call.source("data", data), call.destination("dst", dst)
    call.check_geometry(free_dims=hardware.MAX_REDUCED_DIMS)
    if free_elements(source) % STATISTICS or free_elements(out) != 2 or source.shape[0] != out.shape[0]:
        call.refuse(rules.BN_SIZE, "data", f"{source.shape} into {out.shape}")
    if call.options.arithmetic:
        groups = call.f32("data", source).reshape(source.shape[0], -1, STATISTICS)
        counts, means, squares = groups[..., 0], groups[..., 1], groups[..., 2]
        total = tree_reduce(np.add, counts)
        mean = tree_reduce(np.add, counts * means) / total
        spread = tree_reduce(np.add, squares + counts * np.square(means - mean[:, None]))
        call.store("dst", out, np.stack([mean, spread / total], axis=1))
    call.finish(Engine.vector, free_elements(source))

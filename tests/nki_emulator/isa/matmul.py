"""nc_matmul and nc_transpose on TensorE."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from .. import geometry, hardware, rules
from ..call import MATMUL, Call, Engine, free_elements
from ..memory import OTHER, UNWRITTEN, Buffer
from ..numeric import exact_dot, flush
from ..tensor import Tensor


class PerfMode(Enum):
    """nisa.matmul_perf_mode."""

    none = "none"
    double_row = "double_row"


_SBUF, _PSUM = (Buffer.sbuf,), (Buffer.psum,)


def nc_matmul(
    dst: Any,
    stationary: Any,
    moving: Any,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: Any = PerfMode.none,
    name: str | None = None,
) -> None:
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N], fp32 in PSUM."""
    call = Call("nc_matmul")
    left, right = call.source("stationary", stationary, _SBUF), call.source("moving", moving, _SBUF)
    out = call.destination("dst", dst, _PSUM)
    call.check_geometry()
    if not isinstance(perf_mode, PerfMode):
        call.refuse(rules.ENUMS, "perf_mode", f"{perf_mode!r}")
    double = perf_mode is PerfMode.double_row
    if double:
        _check_double_row(call, left, right, is_transpose, tile_size)
    _check_tiling(call, left, right, out, tile_position, tile_size)
    depth, m, n = _check_shapes(call, left, right, out, double)
    _check_dtypes(call, left, right, out, is_transpose)
    _check_output(call, out, left if is_transpose else None)
    adds = _accumulates(call, out, accumulate)
    if call.options.arithmetic:
        _check_onezero(call, ("stationary", left, is_stationary_onezero), ("moving", right, is_moving_onezero))
        _compute(call, left, right, out, adds, is_transpose)
    call.finish(
        Engine.tensor,
        n,
        code=OTHER if is_transpose else MATMUL,
        K=depth,
        M=m,
        N=n,
        accumulate=adds,
        perf_mode=perf_mode.value,
        transpose=is_transpose,
        onezero=is_stationary_onezero or is_moving_onezero,
        rows=tile_size[0] if tile_size else hardware.PARTITIONS,
    )


def _check_double_row(call: Call, left: Tensor, right: Tensor, is_transpose: bool, tile_size: tuple[int, ...]) -> None:
    if is_transpose or tile_size:
        call.refuse(rules.MATMUL_DOUBLE_ROW, "perf_mode", "with transpose or tiling")
    for role, tensor in (("stationary", left), ("moving", right)):
        if not tensor.dtype.is_fp8 or tensor.ndim != 3 or tensor.shape[1] != hardware.DOUBLE_ROW_FREE_DIM:
            call.refuse(rules.MATMUL_DOUBLE_ROW, role, f"{tensor.dtype} {tensor.shape}")


def _check_tiling(
    call: Call, left: Tensor, right: Tensor, out: Tensor, position: tuple[int, ...], size: tuple[int, ...]
) -> None:
    if left.partition != right.partition:
        found = f"stationary starts at partition {left.partition}, moving at {right.partition}"
        call.refuse(rules.MATMUL_SHAPE, "moving", found)
    if not position and not size:
        return
    if len(position) != 2 or len(size) != 2 or any(s not in (32, 64, 128) for s in size):
        call.refuse(rules.MATMUL_TILING, "tile_size", f"size {size}, position {position}")
    if any(p % s or not 0 <= p < hardware.PARTITIONS for p, s in zip(position, size, strict=True)):
        call.refuse(rules.MATMUL_TILING, "tile_position", f"{position} for size {size}")
    if left.shape[0] > size[0] or left.partition != position[0]:
        found = f"{left.shape[0]} partitions from {left.partition} in row tile {position[0]} of {size[0]}"
        call.refuse(rules.MATMUL_TILING, "stationary", found)
    if left.shape[-1] > size[1] or out.partition != position[1]:
        found = f"{left.shape[-1]} columns into partition {out.partition} by column tile {position[1]} of {size[1]}"
        call.refuse(rules.MATMUL_TILING, "dst", found)


def _check_shapes(call: Call, left: Tensor, right: Tensor, out: Tensor, double: bool) -> tuple[int, int, int]:
    """(contraction depth, M, N)."""
    if left.ndim != (3 if double else 2):
        call.refuse(rules.MATMUL_SHAPE, "stationary", f"shape {left.shape}")
    k, m = left.shape[0], left.shape[-1]
    n = geometry.count(right.shape[2:] if double else right.shape[1:])
    good = right.shape[0] == k and out.shape[0] == m and free_elements(out) == n
    if not good or m > hardware.STATIONARY_FREE_MAX or n > hardware.MOVING_FREE_MAX:
        found = f"stationary {left.shape}, moving {right.shape}, dst {out.shape}"
        call.refuse(rules.MATMUL_SHAPE, "dst", found)
    return k * (2 if double else 1), m, n


def _check_dtypes(call: Call, left: Tensor, right: Tensor, out: Tensor, is_transpose: bool) -> None:
    for role, tensor in (("stationary", left), ("moving", right)):
        if tensor.dtype.is_int:
            call.refuse(rules.MATMUL_DTYPE, role, f"{tensor.dtype}")
    if (left.dtype.name == "float32") != (right.dtype.name == "float32"):
        call.refuse(rules.MATMUL_DTYPE, "moving", f"{left.dtype} with {right.dtype}")
    expected = left.dtype.name if is_transpose else "float32"
    if out.dtype.name != expected:
        call.refuse(rules.MATMUL_DTYPE, "dst", f"{out.dtype}, must be {expected}")


def _check_output(call: Call, out: Tensor, transposed: Tensor | None) -> None:
    """dst lies within one PSUM bank, and leaves room for the 16 bits of a transposed 1-byte element."""
    size = out.dtype.itemsize
    if transposed is not None and size == 1 and (out.strides[-1] != 2 or out.ndim != 2):
        call.refuse(rules.FP8_TRANSPOSE, "dst", f"{out.shape} with strides {out.strides}")
    last = out.row_offset + geometry.extent(out.shape[1:], out.strides[1:]) * size + size - 1
    if out.row_offset // hardware.PSUM_BANK_BYTES != last // hardware.PSUM_BANK_BYTES:
        call.refuse(rules.PSUM_BANK, "dst", f"bytes {out.row_offset}..{last} of a partition")


def _check_onezero(call: Call, *operands: tuple[str, Tensor, bool]) -> None:
    for role, tensor, hinted in operands:
        if hinted and not np.isin(tensor.array().astype(np.float32), (0.0, 1.0)).all():
            call.refuse(rules.MATMUL_ONEZERO, role, "holds other values than 0 and 1")


def _accumulates(call: Call, out: Tensor, accumulate: bool | None) -> bool:
    """Whether this matmul adds to dst; refuses what is undefined on trn2."""
    of_this_trip = bool(call.program.scopes) and out.storage in call.program.scopes[-1]
    if accumulate is None and call.program.loops and not of_this_trip:
        call.refuse(rules.LOOP_ACCUMULATE, "accumulate", "None")
    if accumulate not in (None, True, False):
        call.refuse(rules.OPERAND_KIND, "accumulate", f"{accumulate!r}")
    if accumulate is False:
        return False
    codes = out.storage.marks.read(out.byte_view())
    if accumulate is None and codes == (UNWRITTEN,):
        return False
    if codes == (MATMUL,):
        return True
    if accumulate is None and codes == (OTHER,) and (not call.options.arithmetic or not out.array().any()):
        return False  # zeros: adding and overwriting give the same, and public kernels write them first
    names = {UNWRITTEN: "unwritten", MATMUL: "written by a matmul", OTHER: "written by another instruction"}
    found = f"accumulate={accumulate} on elements that are {', '.join(names[c] for c in codes)}"
    return call.refuse(rules.MATMUL_ACCUMULATE, "dst", found)


def _compute(call: Call, left: Tensor, right: Tensor, out: Tensor, adds: bool, is_transpose: bool) -> None:
    if is_transpose:
        identity = right.array().astype(np.float32).reshape(right.shape[0], -1)
        if adds or not np.array_equal(identity, np.eye(*identity.shape, dtype=np.float32)):
            call.refuse(rules.TRANSPOSE, "moving", "is_transpose needs an identity and no accumulation")
        bits = np.dtype(f"u{left.dtype.itemsize}")
        out.array().view(bits)[...] = left.array().view(bits).T.reshape(out.shape)
        return
    a, b = call.f32("stationary", left), call.f32("moving", right)
    m, n = a.shape[-1], free_elements(out)
    a, b = a.reshape(-1, m), b.reshape(-1, n)
    with np.errstate(all="ignore"):
        product = flush(exact_dot(a, b), call.options).reshape(out.shape)
        target = out.array()
        target[...] = flush(target + product, call.options) if adds else product


def nc_transpose(dst: Any, data: Any, engine: Any = Engine.unknown, name: str | None = None) -> None:
    """dst = data.T, bit for bit; data's free dimensions count as one."""
    call = Call("nc_transpose")
    source, out = call.source("data", data), call.destination("dst", dst)
    call.check_geometry()
    partitions, free = source.shape[0], free_elements(source)
    small = max(partitions, free) <= hardware.VECTOR_TRANSPOSE_MAX
    pe = source.buffer is Buffer.sbuf and out.buffer is Buffer.psum
    chosen = call.engine(engine, (Engine.tensor, Engine.vector), Engine.tensor if pe or not small else Engine.vector)
    if out.dtype != source.dtype or out.shape[0] != free or free_elements(out) != partitions:
        call.refuse(rules.TRANSPOSE, "dst", f"{source.dtype} {source.shape} into {out.dtype} {out.shape}")
    if chosen is Engine.vector and not small:
        call.refuse(rules.TRANSPOSE, "data", f"{source.shape} on VectorE")
    if chosen is Engine.tensor:
        if not pe or max(partitions, free) > hardware.PARTITIONS:
            found = f"{source.shape} from {source.buffer.value} to {out.buffer.value} on TensorE"
            call.refuse(rules.TRANSPOSE, "data", found)
        _check_output(call, out, source)
    if call.options.arithmetic:
        bits = np.dtype(f"u{source.dtype.itemsize}")
        flat = source.array().view(bits).reshape(partitions, free)
        out.array().view(bits)[...] = flat.T.reshape(out.shape)
    call.finish(
        chosen, partitions if chosen is Engine.tensor else free,
        K=partitions, M=free, N=partitions,
    )  # fmt: skip

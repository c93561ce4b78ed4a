"""dma_copy, tensor_copy, memset and the other instructions that move bits."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from .. import geometry, rules
from ..call import HBM, Call, Engine, free_elements
from ..dtypes import DType
from ..memory import Buffer
from ..numeric import Array, constant_f32, constant_int, to_dtype
from ..tensor import Tensor


class DgeMode(Enum):
    """nisa.dge_mode."""

    unknown = "unknown"
    swdge = "swdge"
    hwdge = "hwdge"
    none = "none"


class OobMode(Enum):
    """nisa.oob_mode."""

    error = "error"
    skip = "skip"


_DMA = (*HBM, Buffer.sbuf)

DGE_NUMBERS = {3: DgeMode.none}
"""The number that AWS's nki-library passes for a mode; for the others no public kernel does."""


def dma_copy(
    dst: Any,
    src: Any,
    priority: None = None,
    oob_mode: Any = OobMode.error,
    dge_mode: Any = DgeMode.unknown,
    engine: Any = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = src between HBM and SBUF, elements in row-major order; casts through fp32 if the types differ.

    With oob_mode.skip, rows whose index lies outside are left, and all of it where a scalar offset does.
    """
    call = Call("dma_copy")
    dge_mode = DGE_NUMBERS.get(dge_mode, dge_mode)
    for role, tensor in (("src", src), ("dst", dst)):
        if isinstance(tensor, Tensor) and tensor.buffer is Buffer.psum:
            call.refuse(rules.DMA_NO_PSUM, role, "in PSUM")
    call.skips_outside = oob_mode is OobMode.skip
    source, out = call.source("src", src, _DMA), call.destination("dst", dst, _DMA)
    call.check_overlap()
    if geometry.count(source.shape) != geometry.count(out.shape):
        call.refuse(rules.DMA_COUNT, "src", f"{source.shape} into {out.shape}")
    cast = source.dtype != out.dtype
    if (source.gather or out.gather) and dge_mode not in (DgeMode.unknown, DgeMode.swdge):
        call.refuse(rules.GATHER, "dge_mode", f"{dge_mode}")
    _check_dma_mode(call, priority, oob_mode, dge_mode, engine, cast)
    gathers = source.gather is not None or out.gather is not None
    if gathers:
        call.move_rows(out, source, skip=oob_mode is OobMode.skip)
    elif call.options.arithmetic and not call.skipped:
        call.move("dst", out, "src", source)
    mode = DgeMode.swdge if gathers else dge_mode
    call.finish(Engine.dma, free_elements(out), dge=mode.value, queue=engine.value, cast=cast, gather=gathers)


def _check_dma_mode(call: Call, priority: Any, oob_mode: Any, dge_mode: Any, engine: Any, cast: bool) -> None:
    if not isinstance(dge_mode, DgeMode) or not isinstance(oob_mode, OobMode) or not isinstance(engine, Engine):
        call.refuse(rules.ENUMS, "dge_mode", f"{dge_mode!r}, {oob_mode!r}, {engine!r}")
    if priority is not None:
        call.refuse(rules.DMA_MODE, "priority", "needs trn3")
    if oob_mode is OobMode.skip and not call.dynamic:
        call.refuse(rules.DMA_MODE, "oob_mode", "skip without a run-time offset")
    if cast and dge_mode is DgeMode.hwdge:
        call.refuse(rules.DMA_MODE, "dge_mode", "hwdge with a cast")
    if call.dynamic and dge_mode is DgeMode.none:
        call.refuse(rules.DMA_MODE, "dge_mode", "none with a run-time offset")
    if engine is not Engine.unknown and (dge_mode is not DgeMode.hwdge or engine not in (Engine.sync, Engine.scalar)):
        call.refuse(rules.DMA_MODE, "engine", f"{engine.value} with dge_mode {dge_mode.value}")


_TRANSPOSES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: Any,
    src: Any,
    axes: tuple[int, ...] | None = None,
    priority: None = None,
    dge_mode: Any = DgeMode.unknown,
    oob_mode: Any = OobMode.error,
    name: str | None = None,
) -> None:
    """dst = src with its dimensions reversed (4-D: the first and last swapped), into SBUF, bit for bit."""
    call = Call("dma_transpose")
    source, out = call.source("src", src, _DMA), call.destination("dst", dst, (Buffer.sbuf,))
    call.check_overlap()
    _check_dma_mode(call, priority, oob_mode, dge_mode, Engine.unknown, False)
    if dge_mode not in (DgeMode.unknown, DgeMode.none):
        call.refuse(rules.NOT_MODELLED, "dge_mode", f"{dge_mode.value}: leave the choice to the compiler")
    wanted = _TRANSPOSES.get(source.ndim)
    if wanted is None or (axes is not None and tuple(axes) != wanted):
        call.refuse(rules.DMA_TRANSPOSE, "axes", f"{axes} of {source.ndim} dimensions")
    if source.dtype.itemsize == 1 or source.dtype != out.dtype:
        call.refuse(rules.DMA_TRANSPOSE, "dst", f"{source.dtype} to {out.dtype}")
    if out.shape != tuple(source.shape[axis] for axis in wanted):
        call.refuse(rules.DMA_TRANSPOSE, "dst", f"{source.shape} into {out.shape}")
    if call.options.arithmetic:
        bits = np.dtype(f"u{source.dtype.itemsize}")
        out.array().view(bits)[...] = source.array().view(bits).transpose(wanted)
    call.finish(Engine.dma, free_elements(out), dge=dge_mode.value, cast=False)


def tensor_copy(dst: Any, src: Any, engine: Any = Engine.unknown, name: str | None = None) -> None:
    """dst = src on chip: bits if the types agree, through fp32 otherwise."""
    call = Call("tensor_copy")
    source, out = call.source("src", src), call.destination("dst", dst)
    call.check_geometry()
    call.same_size(out, ("src", source))
    chosen = call.engine(engine, (Engine.vector, Engine.scalar, Engine.gpsimd), Engine.vector)
    if call.options.arithmetic:
        call.move("dst", out, "src", source)
    call.finish(chosen, free_elements(out))


def memset(dst: Any, value: Any, engine: Any = Engine.unknown, name: str | None = None) -> None:
    """Fill dst with a constant of its kind."""
    call = Call("memset")
    out = call.destination("dst", dst)
    call.check_geometry()
    chosen = call.engine(engine, (Engine.vector, Engine.gpsimd), Engine.vector)
    constant = exact_constant(call, value, out.dtype)
    if call.options.arithmetic:
        out.array()[...] = constant
    call.finish(chosen, free_elements(out))


def exact_constant(call: Call, value: Any, dtype: DType) -> Array:
    """The constant in dst's type: an int that an integer type holds, any number rounded to a float type."""
    if (dtype.is_int and type(value) is not int) or type(value) not in (int, float):
        call.refuse(rules.MEMSET_VALUE, "value", f"{value!r} ({type(value).__name__}) into {dtype}")
    if dtype.is_int:
        return constant_int(value, dtype, call.op, "value")
    return to_dtype(np.asarray(constant_f32(value, call.op, "value")), dtype, call.options, call.op, "value")

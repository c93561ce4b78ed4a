"""Registers, and the barrier between the two cores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import numpy as np

from .. import geometry, hardware, rules
from ..call import HBM, Call, Engine
from ..errors import EmulatorError
from ..memory import Buffer
from ..registers import VirtualRegister
from ..tensor import Tensor


class NcVersion(IntEnum):
    """nisa.nc_version: NeuronCore generations, in order."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


def get_nc_version() -> NcVersion:
    """The generation that is compiled for: trn2."""
    return NcVersion.gen3


class DmaEngine(Enum):
    """nisa.dma_engine: what carries an exchange between the cores."""

    dma = "dma"
    gpsimd_dma = "gpsimd_dma"


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A new register, empty or holding a constant."""
    if x is not None and (type(x) is not int or not hardware.INT32_MIN <= x <= hardware.INT32_MAX):
        Call("register_alloc").refuse(rules.REGISTER, "x", f"{x!r} is not an int32 constant")
    return VirtualRegister(x)


def _register(call: Call, role: str, value: Any) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        call.refuse(rules.REGISTER, role, f"{type(value).__name__} is not a register")
    return value


def _element(call: Call, role: str, tensor: Tensor) -> None:
    if geometry.count(tensor.shape) != 1 or tensor.dtype.name not in ("int32", "uint32"):
        call.refuse(rules.REGISTER, role, f"{tensor.dtype} {tensor.shape}: one 32-bit integer")


def register_load(dst: Any, src: Any) -> None:
    """Load one int32 element of SBUF or HBM into a register."""
    call = Call("register_load")
    register = _register(call, "dst", dst)
    source = call.source("src", src, (*HBM, Buffer.sbuf))
    _element(call, "src", source)
    if call.options.arithmetic:
        register.set(call.op, int(source.array().reshape(-1)[0]))
    elif call.options.loaded_register is None:
        raise EmulatorError("register_load in a run without arithmetic: set Options.loaded_register")
    else:
        register.set(call.op, call.options.loaded_register)
    call.finish(Engine.sync, 1)


def register_move(dst: Any, src: Any) -> None:
    """Copy a register or a constant to a register."""
    call = Call("register_move")
    value = src if type(src) is int else _register(call, "src", src).value
    _register(call, "dst", dst).set(call.op, value)
    call.finish(Engine.sync, 1)


def register_store(dst: Any, src: Any) -> None:
    """Store a register into one int32 element of SBUF or HBM."""
    call = Call("register_store")
    out = call.destination("dst", dst, (*HBM, Buffer.sbuf))
    _element(call, "dst", out)
    value = _register(call, "src", src).value
    if call.options.arithmetic:
        out.array()[...] = np.int32(value)
    call.finish(Engine.sync, 1)


def core_barrier(data: Any, cores: Any, engine: Any = Engine.gpsimd, name: str | None = None) -> None:
    """Both programs wait here; afterwards each may read what the other wrote to `data`."""
    call = Call("core_barrier")
    tensor = call.source("data", data, (Buffer.shared_hbm,), check_written=False)
    if tuple(cores) != (0, 1) or call.program.count != hardware.MAX_PROGRAMS:
        call.refuse(rules.CORE_BARRIER, "cores", f"{cores} in a launch of {call.program.count}")
    if call.program.loops:
        call.refuse(rules.NOT_MODELLED, "", "a barrier inside a dynamic loop")
    chosen = call.engine(
        engine, (Engine.tensor, Engine.vector, Engine.scalar, Engine.gpsimd, Engine.sync), Engine.gpsimd
    )
    call.program.core.wait_at(tensor.storage)
    call.finish(chosen, 1)


@dataclass(frozen=True)
class Exchange:
    """What a core waits with in sendrecv: the tiles it gives and fills."""

    pipe: int
    src: Tensor
    dst: Tensor

    def meet(self, other: Exchange) -> bool:
        """Fill both destinations, if the two belong together."""
        pairs = ((self, other), (other, self))
        sizes = {(t.shape[0], geometry.count(t.shape), t.dtype.name) for e, _ in pairs for t in (e.src, e.dst)}
        if self.pipe != other.pipe or len(sizes) != 1:
            return False
        if self.src.storage.data is not None:
            given = [e.src.raw().copy() for e, _ in pairs]
            for (_, receiver), data in zip(pairs, given, strict=True):
                receiver.dst.raw()[...] = data.reshape(receiver.dst.raw().shape)
        return True


def sendrecv(
    src: Any,
    dst: Any,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    name: str | None = None,
    dma_engine: Any = DmaEngine.dma,
) -> None:
    """Give src to the other core and take its src into dst; both cores meet here."""
    call = Call("sendrecv")
    if not isinstance(dma_engine, DmaEngine):
        call.refuse(rules.ENUMS, "dma_engine", f"{dma_engine!r}")
    given, taken = call.source("src", src, (Buffer.sbuf,)), call.destination("dst", dst, (Buffer.sbuf,))
    call.check_overlap()
    other = 1 - call.program.index
    if call.program.count != hardware.MAX_PROGRAMS or (send_to_rank, recv_from_rank) != (other, other):
        call.refuse(rules.SENDRECV, "send_to_rank", f"{send_to_rank}, {recv_from_rank} of {call.program.count} cores")
    if call.program.loops:
        call.refuse(rules.NOT_MODELLED, "", "an exchange inside a dynamic loop")
    call.program.core.wait_at(Exchange(pipe_id, given, taken))
    carrier = Engine.gpsimd if dma_engine is DmaEngine.gpsimd_dma else Engine.dma
    call.finish(carrier, geometry.count(taken.shape[1:]))

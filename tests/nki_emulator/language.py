"""The names of nki.language. Anything else that is looked up here is refused by name."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import numpy as np

from . import dtypes, hardware, rules
from .call import Call, Engine, free_elements
from .context import current, refuse, refuse_name
from .dtypes import DType
from .isa import memset, tensor_copy, tensor_reduce
from .loops import dynamic_range, fori_loop, while_loop
from .memory import OTHER, Buffer
from .operators import OPS
from .tensor import DynamicSlice, Tensor, new_tensor, whole

sbuf = Buffer.sbuf
psum = Buffer.psum
shared_hbm = Buffer.shared_hbm
private_hbm = Buffer.private_hbm
hbm = Buffer.private_hbm


class NKIObject:
    """Base of the plain classes a kernel may use: attributes of the class are its fields, as in a dataclass.

    NKI's own compiler takes fields without an annotation, and classes without the decorator; public kernels have both.
    """

    def __init__(self, **fields: Any) -> None:
        known = {name for base in type(self).__mro__ for name in inspect.get_annotations(base)}
        for name, value in fields.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
            setattr(self, name, value)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        annotations = inspect.get_annotations(cls)
        for name, value in list(vars(cls).items()):
            if not name.startswith("_") and not callable(value) and not hasattr(value, "__get__"):
                annotations.setdefault(name, Any)
        cls.__annotations__ = annotations


class tile_size:  # noqa: N801 - NKI's own spelling
    """Sizes a kernel may ask for."""

    pmax = hardware.PARTITIONS
    gemm_stationary_fmax = hardware.STATIONARY_FREE_MAX
    gemm_moving_fmax = hardware.MOVING_FREE_MAX
    bn_stats_fmax = hardware.BN_STATS_FREE_MAX
    psum_fmax = psum_bank_fmax = hardware.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = hardware.PSUM_BANK_BYTES
    psum_num_banks = hardware.PSUM_BANKS
    sbuf_fmax_bytes = total_available_sbuf_size = hardware.SBUF_BYTES_PER_PARTITION
    sbuf_fmax = hardware.SBUF_BYTES_PER_PARTITION // 4
    sbuf_size_bytes = hardware.SBUF_BYTES_PER_PARTITION * hardware.PARTITIONS


def ndarray(
    shape: Any, dtype: Any, buffer: Any = Buffer.sbuf, name: str = "", address: tuple[int, int] | None = None
) -> Tensor:
    """A new tensor. Its elements are not initialised; where it is placed (`address`) is not modelled."""
    tensor = new_tensor(shape, dtype, buffer)
    tensor.storage.name = name
    return tensor


def ds(start: int, size: int) -> DynamicSlice:
    """The slice start : start + size."""
    return DynamicSlice(start, size)


def program_id(axis: int) -> int:
    """Index of the running program."""
    if axis != 0:
        refuse(rules.GRID, "nl.program_id", "axis", f"{axis!r}: the grid has one axis")
    return current().index


def num_programs(axes: int | None = None) -> int:
    """Number of programs of the launch."""
    if axes not in (None, 0):
        refuse(rules.GRID, "nl.num_programs", "axes", f"{axes!r}: the grid has one axis")
    return current().count


def program_ndim() -> int:
    """1 if the kernel was launched with a grid, else 0."""
    return current().ndim


def zeros(shape: Any, dtype: Any, buffer: Any = Buffer.sbuf, name: str = "") -> Tensor:
    """A new on-chip tensor of zeros."""
    tensor = ndarray(shape, dtype, buffer, name)
    memset(dst=tensor, value=0)
    return tensor


def sum(x: Tensor, axis: Any, dtype: DType | None = None, keepdims: bool = False) -> Tensor:  # noqa: A001 - NKI's name
    """A new SBUF tensor: x summed over trailing free axes."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    kept = x.shape[: x.ndim - len(axes)] + ((1,) * len(axes) if keepdims else ())
    out = ndarray(kept if len(kept) > 1 else (*kept, 1), x.dtype if dtype is None else dtype)
    tensor_reduce(dst=out, op=OPS["add"], data=x, axis=axes, keepdims=keepdims)
    return out


def broadcast_to(x: Tensor, shape: Any) -> Tensor:
    """A view of x whose dimensions of size 1 are repeated."""
    view = x
    for axis, size in enumerate(shape):
        if view.shape[axis] != size:
            view = view.broadcast(axis, size)
    return view


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """A plain unrolled range, by its older name."""
    return static_range(start, stop, step)


sequential_range = affine_range


def static_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """A plain unrolled range."""
    return range(start) if stop is None else range(start, stop, step)


def shared_identity_matrix(n: int, dtype: Any = dtypes.uint8, dst: Tensor | None = None) -> Tensor:
    """The n x n identity in SBUF; one copy per program and type, or written to `dst`."""
    if dst is not None:
        tensor_copy(dst=dst, src=shared_identity_matrix(n, dst.dtype))
        return dst
    program = current()
    key = n, str(dtype)
    if key not in program.identities:
        tensor = new_tensor((n, n), dtype, Buffer.sbuf)
        if program.options.arithmetic:
            tensor.array()[...] = np.eye(n).astype(tensor.dtype.numpy)
        tensor.storage.marks.write(tensor.byte_view(), OTHER)
        program.identities[key] = tensor.storage
        if program.scopes:
            program.scopes[-1].discard(tensor.storage)
        call = Call("shared_identity_matrix")
        call.source("constant", tensor)
        call.finish(Engine.dma, free_elements(tensor))
    return whole(program.identities[key])


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    dtype = getattr(dtypes, name, None)
    if isinstance(dtype, DType):
        return dtype
    if name in OPS:
        return OPS[name]
    return _refuse(name)


def _refuse(name: str) -> NoReturn:
    refuse_name(rules.NOT_MODELLED, "nl", name)


__all__ = [
    "NKIObject",
    "affine_range",
    "broadcast_to",
    "ds",
    "dynamic_range",
    "fori_loop",
    "hbm",
    "ndarray",
    "num_programs",
    "private_hbm",
    "program_id",
    "program_ndim",
    "psum",
    "sbuf",
    "sequential_range",
    "shared_hbm",
    "shared_identity_matrix",
    "static_range",
    "sum",
    "tile_size",
    "while_loop",
    "zeros",
]  # fmt: skip

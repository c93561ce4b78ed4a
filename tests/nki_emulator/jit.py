"""nki.jit and the launch of a kernel over its programs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from . import dtypes, geometry, hardware, rules
from .context import Options, Program, SharedMemory, activate, refuse, running
from .cores import run_programs
from .errors import EmulatorError, Rule
from .isa.control import Exchange
from .language import NKIObject
from .memory import HOST, UNWRITTEN, Buffer, Memory, Storage, from_host
from .record import Instruction
from .tensor import Tensor, whole

Array = npt.NDArray[Any]
_Returned = tuple[list[Tensor], bool]
"""Results of a program, and whether it returned one tensor rather than a tuple."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of an argument, without data: for a run without arithmetic."""

    shape: tuple[int, ...]
    dtype: str
    """An nl type's name, e.g. "bfloat16"."""


@dataclass(frozen=True)
class Launch:
    """What a launch left behind."""

    outputs: tuple[Array, ...]
    """The results; empty arrays after a run without arithmetic."""
    single: bool
    """Whether the kernel returned one tensor rather than a tuple."""
    instructions: tuple[Instruction, ...]
    sbuf_peak: int
    """Most SBUF bytes a partition in use at once, over the programs."""
    psum_peak: int
    """Most PSUM banks in use at once."""


class Kernel:
    """A function decorated with nki.jit."""

    def __init__(self, function: Callable[..., Any], grid: int | None = None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.grid = grid

    def __getitem__(self, grid: Any) -> Kernel:
        if type(grid) is not int or not 1 <= grid <= hardware.MAX_PROGRAMS:
            refuse(rules.GRID, self.function.__name__, "grid", f"{grid!r}")
        return Kernel(self.function, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run with default options and return the results as NumPy arrays; inside a kernel, a plain call."""
        if running():
            return self.function(*args, **kwargs)
        result = launch(self, args, kwargs, Options())
        return result.outputs[0] if result.single else result.outputs


def _refuse(kernel: Kernel, rule: Rule, operand: str, found: str) -> NoReturn:
    """Raise a rule's error at the kernel's definition: there is no line of it that runs."""
    code = kernel.function.__code__
    refuse(rule, code.co_name, operand, found, f"{code.co_filename}:{code.co_firstlineno}")


JIT_OPTIONS = {"mode", "platform_target", "debug_kernel", "experimental_flags", "show_compiler_tb"}
"""Options of nki.jit that say how it is built, not what it computes."""


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator of a kernel's entry function."""
    if options.keys() - JIT_OPTIONS:
        refuse(rules.NOT_MODELLED, "nki.jit", "", f"options {sorted(options)}")
    if function is None:
        return jit
    _check_signature(function)
    return Kernel(function)


def _check_signature(function: Callable[..., Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            found = f"parameter {parameter.name} is {parameter.kind.description}"
            refuse(rules.KERNEL_ARGUMENTS, function.__name__, parameter.name, found)


def launch(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Launch:
    """Run every program of a kernel, one after the other, and collect results and record."""
    count = kernel.grid or 1
    bound = inspect.signature(kernel.function).bind(*args, **kwargs)
    values = {key: _argument(kernel, key, value, options) for key, value in bound.arguments.items()}
    shared = SharedMemory()
    ndim = 0 if kernel.grid is None else 1
    programs = [Program(options, index, count, ndim, Memory(), shared) for index in range(count)]
    returned = _run(kernel, programs, lambda: _results(kernel, kernel.function(**values)))
    _check_programs(kernel, programs, returned)
    tensors, single = returned[0]
    _check_names(kernel, shared, [tensor.storage for tensor in tensors])
    for position, tensor in enumerate(tensors):
        _check_complete(kernel, position, tensor.storage)
    return Launch(
        outputs=tuple(_to_host(tensor) for tensor in tensors),
        single=single,
        instructions=tuple(i for program in programs for i in program.instructions),
        sbuf_peak=max(program.memory.peak(Buffer.sbuf) for program in programs),
        psum_peak=max(program.memory.peak(Buffer.psum) for program in programs),
    )


def _run(kernel: Kernel, programs: list[Program], body: Callable[[], _Returned]) -> list[_Returned]:
    if len(programs) == 1:
        activate(programs[0])
        try:
            return [body()]
        finally:
            activate(None)

    def cross(waiting: list[Any]) -> None:
        if all(isinstance(exchange, Exchange) for exchange in waiting):
            if not waiting[0].meet(waiting[1]):
                _refuse(kernel, rules.SENDRECV, "", "the programs' tiles differ in size or type, or their pipes do")
            return
        if waiting[0] is None or any(storage is not waiting[0] for storage in waiting):
            _refuse(kernel, rules.CORE_BARRIER, "", "the programs do not wait for the same tensor")
        waiting[0].marks.publish()

    return run_programs(programs, body, cross)


def _argument(kernel: Kernel, name: str, value: Any, options: Options) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_argument(kernel, name, item, options) for item in value)
    if isinstance(value, NKIObject):
        converted = copy.copy(value)
        for key, item in vars(value).items():
            object.__setattr__(converted, key, _argument(kernel, f"{name}.{key}", item, options))
        return converted
    if isinstance(value, Enum | dtypes.DType):
        return value
    if value is None or isinstance(value, bool | int | float | str):
        if type(value) is int and not hardware.INT32_MIN <= value <= hardware.INT32_MAX:
            _refuse(kernel, rules.CONSTANT, name, f"{value} is not a 32-bit int")
        return value
    if isinstance(value, TensorSpec):
        return _specified(kernel, name, value, options)
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        _refuse(kernel, rules.KERNEL_ARGUMENTS, name, f"{type(value).__name__}")
    dtype = dtypes.from_numpy(value.dtype)
    if dtype is None:
        rule = rules.NO_FN_TENSOR if value.dtype.name == "float8_e4m3fn" else rules.DTYPE
        _refuse(kernel, rule, name, f"array of {value.dtype}")
    return whole(from_host(value, dtype))


def _specified(kernel: Kernel, name: str, spec: TensorSpec, options: Options) -> Tensor:
    if options.arithmetic:
        raise EmulatorError(
            f"{kernel.function.__name__}: {name}: a TensorSpec has no data: run with Options(arithmetic=False)"
        )
    dtype = getattr(dtypes, spec.dtype, None)
    if not isinstance(dtype, dtypes.DType) or dtype.kind == "refused":
        _refuse(kernel, rules.DTYPE, name, f"{spec.dtype!r}")
    return whole(Storage(Buffer.shared_hbm, spec.shape, dtype, writer=HOST))


def _results(kernel: Kernel, value: Any) -> _Returned:
    single = not isinstance(value, tuple | list)
    tensors = [value] if single else list(value)
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            _refuse(kernel, rules.RESULT, f"result {position}", f"{type(tensor).__name__}")
        entire = whole(tensor.storage)
        same = tensor.offset == 0 and tensor.is_contiguous() and not tensor.is_indirect()
        counts = geometry.count(tensor.shape), geometry.count(entire.shape)
        if tensor.buffer is not Buffer.shared_hbm or not same or counts[0] != counts[1] or tensor.dtype != entire.dtype:
            _refuse(kernel, rules.RESULT, f"result {position}", f"{tensor.shape} view in {tensor.buffer.value}")
    return tensors, single


def _check_programs(kernel: Kernel, programs: list[Program], returned: list[_Returned]) -> None:
    for program, (tensors, _) in zip(programs[1:], returned[1:], strict=True):
        if [(id(t.storage), t.shape) for t in tensors] != [(id(t.storage), t.shape) for t in returned[0][0]]:
            _refuse(kernel, rules.SAME_STRUCTURE, "results", "the programs return different tensors")
        if not program.instructions or not programs[0].instructions:
            idle = program.index if not program.instructions else 0
            _refuse(kernel, rules.IDLE_PROGRAM, "", f"program {idle} issues no instruction")
        if program.trips != programs[0].trips:
            found = f"{programs[0].trips} in program 0, {program.trips} in program {program.index}"
            _refuse(kernel, rules.SAME_CONTROL_FLOW, "", found)


def _check_names(kernel: Kernel, shared: SharedMemory, results: list[Storage]) -> None:
    for storage in shared.storages:
        if not any(storage is result for result in results) and not storage.name:
            _refuse(kernel, rules.SHARED_NAME, "", f"shared_hbm tensor {storage.shape} {storage.dtype}")


def _check_complete(kernel: Kernel, position: int, storage: Storage) -> None:
    tensor = whole(storage)
    if storage.marks.read(tensor.byte_view())[0] == UNWRITTEN:
        _refuse(kernel, rules.RESULT_UNWRITTEN, f"result {position}", f"{storage.shape} {storage.dtype} is incomplete")


def _to_host(tensor: Tensor) -> Array:
    if tensor.storage.data is None:
        return np.empty(0, tensor.dtype.numpy)
    array: Array = tensor.storage.data.view(tensor.dtype.numpy).reshape(tensor.shape)
    return array.view(np.bool_) if tensor.dtype.name == "bool_" else array


__all__ = ["Kernel", "Launch", "TensorSpec", "jit", "launch"]

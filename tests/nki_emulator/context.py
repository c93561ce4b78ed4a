"""What a running program is: its place in the grid, its memories, its record.

A kernel runs once per program, one program after the other, sharing HBM. `current()` is the program that runs now.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from .errors import EmulatorError, Rule, RuleError, UnknownNameError
from .hardware import PARTITIONS
from .record import Instruction

if TYPE_CHECKING:
    from .memory import Memory, Storage

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Options:
    """How to run a kernel."""

    flush_subnormals: bool = False
    """Flush fp32 subnormals to zero wherever an engine reads or writes a value (not in bit copies)."""
    arithmetic: bool = True
    """False: check and record every instruction, but allocate and compute nothing."""
    loaded_register: int | None = None
    """What register_load yields when `arithmetic` is False and there is no value to load."""


@dataclass
class Program:
    """One program of a launch."""

    options: Options
    index: int
    count: int
    ndim: int
    memory: Memory
    shared: SharedMemory
    instructions: list[Instruction] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    """Trip number of each dynamic loop that is running."""
    trips: list[tuple[str, int]] = field(default_factory=list)
    """(location, trip count) of each dynamic loop that ran: must agree between cores."""
    scopes: list[weakref.WeakSet[Storage]] = field(default_factory=list)
    """Storages of the current trip of each running loop; weak, so that a trip frees what it no longer names."""
    activations: set[str] = field(default_factory=set)
    accumulators: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((PARTITIONS, 1), np.float32))
    """ScalarE's accumulator registers, one a partition."""
    reset_lanes: set[int] = field(default_factory=set)
    """Partitions whose accumulator was reset."""
    touched: list[Storage] = field(default_factory=list)
    """What the running dynamic loop used so far."""
    identities: dict[tuple[int, str], Storage] = field(default_factory=dict)
    shared_allocated: int = 0
    core: Any = None
    """The thread that runs it, in a launch of several programs."""

    def touch(self, storage: Storage) -> None:
        """The instruction that is issued now uses this storage."""
        if storage.lifetime is not None:
            storage.lifetime.touch(len(self.instructions))
            if self.loops:
                self.touched.append(storage)


@dataclass
class SharedMemory:
    """shared_hbm, which all programs of a launch see. The k-th allocation is the same memory in each of them."""

    storages: list[Storage] = field(default_factory=list)


_state = threading.local()


def current() -> Program:
    """The running program."""
    program: Program | None = getattr(_state, "program", None)
    if program is None:
        raise EmulatorError("this name works only inside a running kernel: call it through nki_emulator.run(...)")
    return program


def running() -> bool:
    """Whether a kernel is running in this thread."""
    return getattr(_state, "program", None) is not None


def activate(program: Program | None) -> None:
    """Make `program` the one that runs in this thread; None ends it."""
    _state.program = program


def location() -> str:
    """File and line of the innermost frame outside the emulator: the kernel's own source line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def refuse(rule: Rule, op: str, operand: str, found: str, where: str = "") -> NoReturn:
    """Raise the error of a broken rule, at `where` or else at the kernel's current line."""
    raise RuleError(rule, op, operand, found, where or location())


def refuse_name(rule: Rule, where: str, name: str) -> NoReturn:
    """Raise the error of a name that is not in the subset; hasattr() sees it as absent."""
    raise UnknownNameError(rule, f"{where}.{name}", "", "not in the emulated subset", location())

"""Dynamic loops (aws-neuron-sdk docs: nki/deep-dives/nki-dynamic-loops)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import hardware, rules
from .context import Program, current, location, refuse
from .record import Instruction
from .registers import VirtualRegister


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """Run body_fun(i) for i = lower, lower + step, ... below upper. Bounds may be registers."""
    first, last = _bound("lower", lower), _bound("upper", upper)
    if type(step) is not int or step < 1:
        refuse(rules.LOOP_BOUNDS, "fori_loop", "step", f"{step!r}")

    for index in _trips("fori_loop", range(first, last, step)):
        if body_fun(VirtualRegister(index, frozen=True)) is not None:  # type: ignore[func-returns-value]
            refuse(rules.LOOP_BODY, "fori_loop", "body_fun", "returns a value")


def dynamic_range(start: Any, stop: Any, step: int = 1) -> Iterator[VirtualRegister]:
    """The older form of fori_loop, in a `for` statement: NKI 0.6 takes it and says that it will go."""
    first, last = _bound("start", start), _bound("stop", stop)
    if type(step) is not int or step < 1:
        refuse(rules.LOOP_BOUNDS, "dynamic_range", "step", f"{step!r}")
    for index in _trips("dynamic_range", range(first, last, step)):
        yield VirtualRegister(index, frozen=True)


def while_loop(init: Any, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """Run body_fun(r) while its register, at first `init`, is not 0."""
    if not isinstance(init, VirtualRegister):
        refuse(rules.LOOP_BOUNDS, "while_loop", "init", f"{type(init).__name__} is not a register")
    register = init

    def pending() -> Iterator[int]:
        index = 0
        while register.value != 0:
            yield index
            index += 1

    for _ in _trips("while_loop", pending()):
        result: Any = body_fun(register)
        if not isinstance(result, VirtualRegister):
            refuse(rules.LOOP_BODY, "while_loop", "body_fun", "must return the next condition register")
        register = result


def _bound(role: str, value: Any) -> int:
    if isinstance(value, VirtualRegister):
        return value.value
    if type(value) is not int or not hardware.INT32_MIN <= value <= hardware.INT32_MAX:
        refuse(rules.LOOP_BOUNDS, "fori_loop", role, f"{value!r}")
    return value


def _trips(op: str, indices: Iterable[int]) -> Iterator[int]:
    """The trips of one loop, whose bodies run between them: each in its own scope, issuing the same instructions."""
    program = current()
    if program.loops:
        refuse(rules.LOOP_NESTING, op, "", "inside another dynamic loop")
    where = f"{op} at {location()}"
    program.loops.append(0)
    issued: list[tuple[Any, ...]] | None = None
    trips, before = 0, len(program.instructions)
    for index in indices:
        program.loops[-1] = trips
        start = len(program.instructions)
        program.scopes.append(weakref.WeakSet())
        yield index
        _close_scope(program)
        signature = [_signature(i) for i in program.instructions[start:] if i.op != "shared_identity_matrix"]
        if issued is not None and signature != issued:
            refuse(rules.LOOP_BODY, op, "body_fun", f"trip {trips} issues other instructions than trip 0")
        issued, trips = signature, trips + 1
    program.loops.pop()
    for storage in program.touched:  # live for the entire loop
        if storage.lifetime is not None:
            storage.lifetime.touch(before)
            storage.lifetime.touch(len(program.instructions) - 1)
    program.touched.clear()
    program.trips.append((where, trips))


def _close_scope(program: Program) -> None:
    for storage in program.scopes.pop():
        storage.dead = True


def _signature(instruction: Instruction) -> tuple[Any, ...]:
    return (instruction.op, instruction.engine, instruction.operands, instruction.flags, instruction.location)

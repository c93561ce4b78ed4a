"""The instruction record: one frozen entry for every instruction a program issues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operand:
    """One tensor operand as an engine sees it."""

    role: str
    buffer: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    partitions: int
    """Partitions it spans; 1 for HBM, which has none."""
    elements: int
    """Elements a partition (all elements, for HBM)."""
    run_bytes: int
    """Bytes of its longest contiguous run within a partition: what one DMA descriptor element can move."""
    inner_step: int
    """Element step of the innermost dimension longer than 1."""
    place: tuple[int, int, int] = field(compare=False)
    """Which allocation it lies in, and the first byte of a partition that it spans and the one after the last."""

    def touches(self, other: Operand) -> bool:
        """Whether both span some of the same bytes, whatever their partitions."""
        mine, theirs = self.place, other.place
        return mine[0] == theirs[0] and mine[1] < theirs[2] and theirs[1] < mine[2]

    @property
    def bytes(self) -> int:
        """Bytes over all partitions."""
        return self.partitions * self.elements * self.itemsize


@dataclass(frozen=True)
class Instruction:
    """One instruction: who runs it, on what, and the flags that change its cost.

    `elements` is the number of elements a partition that the engine streams (for a matmul: the moving free size N);
    `flags` holds (name, value) pairs such as ("K", "128") or ("accumulate", "True").
    """

    op: str
    engine: str
    program: int
    operands: tuple[Operand, ...]
    elements: int
    flags: tuple[tuple[str, str], ...]
    loops: tuple[int, ...]
    """Trips so far of the dynamic loops around it, outermost first; empty outside any."""
    location: str

    def operand(self, role: str) -> Operand:
        """The operand of that role. Raises KeyError if there is none."""
        for operand in self.operands:
            if operand.role == role:
                return operand
        raise KeyError(f"{self.op} has no operand {role!r}")

    def flag(self, name: str, default: str = "") -> str:
        """The value of one flag."""
        return dict(self.flags).get(name, default)

    @property
    def writes(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.role in ("dst", "reduce_res"))

    @property
    def reads(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.role not in ("dst", "reduce_res"))


def count(instructions: tuple[Instruction, ...] | list[Instruction], op: str) -> int:
    """How many instructions of one name were issued, over all programs."""
    return sum(instruction.op == op for instruction in instructions)


def signatures(instructions: Iterable[Instruction]) -> Counter[str]:
    """How often each form of instruction was issued: its name, engine, and operands' memory, type and innermost step.

    For comparison with what public kernels do: a form that none of them has may be the first of its kind on a device.
    """
    return Counter(
        f"{instruction.op} on {instruction.engine}: "
        + ", ".join(f"{o.role} {o.buffer} {o.dtype} step {o.inner_step}" for o in instruction.operands)
        for instruction in instructions
    )

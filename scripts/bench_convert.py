"""Time converting and verifying beside what people do instead, on one checkpoint, in one run, interleaved.

    python scripts/bench_convert.py FOLDER --size 4GB --rounds 5

FOLDER is where the checkpoint and the outputs are made (a disk, or a tmpfs such as /dev/shm); it needs four
times the size. Everything starts from a warm page cache and ends with the data synced. A first round is not
counted: it pays for memory that the machine had not handed out before. Shown are medians; ratios are of the clock and,
in brackets, of processor seconds, which other work on the machine disturbs less.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
from make_checkpoint import SampleOptions, write_checkpoint

from deepinfer_prep.files.sizes import format_size, parse_size

LOAD_TIME_METHOD = """
import sys
from pathlib import Path
import numpy as np
import torch
from safetensors.torch import load_file, save_file

table = (torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 2).to(torch.float8_e4m3fn)
table = table.view(torch.uint8).numpy()
source, output = Path(sys.argv[1]), Path(sys.argv[2])
output.mkdir()
step = 64 * 1024 * 1024
for path in sorted(source.glob("*.safetensors")):
    tensors = load_file(path)
    for name, tensor in tensors.items():
        raw = tensor.view(torch.uint8).reshape(-1).numpy() if tensor.element_size() == 1 else None
        if tensor.dtype == torch.float8_e4m3fn:
            for start in range(0, raw.size, step):
                raw[start : start + step] = np.take(table, raw[start : start + step])
        elif tensor.dtype == torch.float8_e8m0fnu:
            raw += 1
    save_file(tensors, output / path.name, metadata={"format": "pt"})
"""


class Taken(NamedTuple):
    """Seconds by the clock and of processors, and peak resident bytes."""

    seconds: float
    processor: float
    peak: int


class Bench:
    """The contestants over one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.source, self.copied, self.output = folder / "source", folder / "copied", folder / "output"
        self.loaded, self.laid_out = folder / "loaded", folder / "laid_out"

    def copy(self) -> Taken:
        """`cp -r` and sync."""
        shutil.rmtree(self.copied, ignore_errors=True)
        warm(self.source)
        return measure(["sh", "-c", f"cp -r '{self.source}' '{self.copied}' && sync"])

    def load_time(self) -> Taken:
        """Load each shard with safetensors, numpy.take in 64 MiB chunks, save it, sync."""
        shutil.rmtree(self.loaded, ignore_errors=True)
        warm(self.source)
        script = ["-c", LOAD_TIME_METHOD, str(self.source), str(self.loaded)]
        result = measure([sys.executable, *script], then_sync=True)
        shutil.rmtree(self.loaded)
        return result

    def convert(self) -> Taken:
        """`deepinfer-prep convert`."""
        return self._convert(self.output, "stored")

    def convert_for_kernels(self) -> Taken:
        """`deepinfer-prep convert --layout kernel`."""
        result = self._convert(self.laid_out, "kernel")
        shutil.rmtree(self.laid_out)
        return result

    def _convert(self, output: Path, layout: str) -> Taken:
        shutil.rmtree(output, ignore_errors=True)
        warm(self.source)
        command = [sys.executable, "-m", "deepinfer_prep", "convert", str(self.source), str(output), "--quiet"]
        return measure([*command, "--layout", layout])

    def compare(self) -> Taken:
        """`cmp` of the checkpoint and its copy, file by file."""
        pairs = (
            (path, self.copied / path.relative_to(self.source)) for path in self.source.rglob("*") if path.is_file()
        )
        return measure(["sh", "-c", " && ".join(f"cmp '{one}' '{other}'" for one, other in pairs)])

    def verify(self) -> Taken:
        """`deepinfer-prep verify --source`."""
        warm(self.source, self.output)
        command = [sys.executable, "-m", "deepinfer_prep", "verify", str(self.output), "--source", str(self.source)]
        return measure([*command, "--quiet"])


def warm(*folders: Path) -> None:
    """Bring folders into the page cache: what was written last would otherwise have an advantage."""
    for folder in folders:
        subprocess.run(["sh", "-c", f"find '{folder}' -type f -exec cat {{}} + > /dev/null"], check=True)


def measure(command: list[str], then_sync: bool = False) -> Taken:
    """What a process and its children take."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[:4]} ended with status {process.returncode}")
    if then_sync:
        os.sync()
    processor = usage.ru_utime + usage.ru_stime
    return Taken(time.perf_counter() - started, processor, usage.ru_maxrss * 1024)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="2GB", show_default=True, help="Size of the sample checkpoint.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="How often each is timed.")
@click.option("--without-load-time", is_flag=True, help="Leave the load-time method out (it is slow).")
@click.option("--layouts", is_flag=True, help="Time only converting, to either layout.")
def main(folder: Path, size: str, rounds: int, without_load_time: bool, layouts: bool) -> None:
    """Print a table of medians and ratios."""
    bench = Bench(folder)
    if not bench.source.exists():
        write_checkpoint(bench.source, SampleOptions(size=parse_size(size)))
    contestants: dict[str, Callable[[], Taken]] = {
        "cp -r + sync": bench.copy,
        "convert": bench.convert,
        "--layout kernel": bench.convert_for_kernels,
        "cmp": bench.compare,
        "verify --source": bench.verify,
    }
    if not without_load_time:
        contestants["load-time method"] = bench.load_time
    if layouts:
        contestants = {name: contestants[name] for name in ("convert", "--layout kernel")}
    taken: dict[str, list[Taken]] = {name: [] for name in contestants}
    for number in range(1 + rounds):
        for name, run in contestants.items():
            result = run()
            if number > 0:
                taken[name].append(result)
    print_table(bench.source, taken)


def print_table(source: Path, taken: dict[str, list[Taken]]) -> None:
    """Medians, ratios to what each is compared with, and peak memory."""
    total = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    beside = {"verify --source": "cmp", "load-time method": "convert", "--layout kernel": "convert"}
    if "cp -r + sync" in taken:
        beside["convert"] = "cp -r + sync"
    click.echo(f"{format_size(total)} on {source.parent}, {os.cpu_count()} processors ({platform.machine()})")
    click.echo(f"{'':18}{'median s':>10}{'min':>8}{'max':>8}{'processor s':>13}{'rate':>12}{'peak RSS':>11}  ratio")
    for name, runs in taken.items():
        times = [run.seconds for run in runs]
        median, processor = statistics.median(times), statistics.median(run.processor for run in runs)
        ratio = ""
        if other := beside.get(name):
            by_clock = median / statistics.median(run.seconds for run in taken[other])
            by_processor = processor / statistics.median(run.processor for run in taken[other])
            ratio = f"{by_clock:.2f} ({by_processor:.2f}) of {other}"
        rate, peak = format_size(int(total / median)) + "/s", format_size(max(run.peak for run in runs))
        click.echo(
            f"{name:18}{median:10.2f}{min(times):8.2f}{max(times):8.2f}{processor:13.2f}{rate:>12}{peak:>11}  {ratio}"
        )


if __name__ == "__main__":
    main()

"""Kill a conversion at random moments and show that the resumed result is always the same.

python scripts/kill_test.py FOLDER --size 2GB --kills 20
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import xxhash
from make_checkpoint import SampleOptions, write_checkpoint

from deepinfer_prep.files.sizes import parse_size

MANIFEST = "neuron_manifest.json"


def start(source: Path, output: Path) -> subprocess.Popen[bytes]:
    """Begin a conversion."""
    command = [sys.executable, "-m", "deepinfer_prep", "convert", str(source), str(output), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def finish(source: Path, output: Path) -> float:
    """Run a conversion to its end; returns the seconds."""
    started = time.monotonic()
    if start(source, output).wait():
        raise SystemExit(f"converting into {output} failed")
    return time.monotonic() - started


def fingerprint(folder: Path) -> dict[str, str]:
    """Digest of every file by relative name."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest = xxhash.xxh3_128()
            with path.open("rb") as file:
                while chunk := file.read(1 << 24):
                    digest.update(chunk)
            digests[str(path.relative_to(folder))] = digest.hexdigest()
    return digests


def kill_and_resume(source: Path, output: Path, seconds: float) -> tuple[bool, int, float]:
    """Kill after some seconds, then resume; (killed before the end, final names seen, seconds of the resume)."""
    process = start(source, output)
    time.sleep(seconds)
    killed = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not killed or (output / MANIFEST).exists():
        return False, 0, 0.0
    names = [path for path in output.glob("*") if path.name != ".deepinfer-prep"] if output.exists() else []
    return True, len(names), finish(source, output)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="2GB", show_default=True, help="Size of the sample checkpoint.")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(1), help="How many runs are killed.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random moments.")
def main(folder: Path, size: str, kills: int, seed: int) -> None:
    """Print a line a kill; exit status 1 if any resumed output differs."""
    source, output = folder / "source", folder / "output"
    if not source.exists():
        write_checkpoint(source, SampleOptions(size=parse_size(size)))
    shutil.rmtree(output, ignore_errors=True)
    duration = finish(source, output)
    expected = fingerprint(output)
    click.echo(f"uninterrupted: {duration:.2f} s, {len(expected)} files")
    moments, done, wrong = random.Random(seed), 0, 0
    while done < kills:
        shutil.rmtree(output)
        seconds = moments.uniform(0.05, duration)
        killed, names, resume = kill_and_resume(source, output, seconds)
        if not killed:
            continue
        done += 1
        same = fingerprint(output) == expected
        wrong += not same
        click.echo(
            f"{done:3}: killed after {seconds:.2f} s with {names} final names in place, resumed in {resume:.2f} s: "
            f"{'identical' if same else 'DIFFERENT'}"
        )
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""Fuzz the safetensors reader against the safetensors library.

    python scripts/fuzz_container.py random --seconds 60      # no coverage guidance, nothing to install
    pip install atheris && python scripts/fuzz_container.py guided -max_total_time=3600 CORPUS

Both stop at the first file that the two readers see differently, and keep what made it in the current folder.
"""

from __future__ import annotations

import inspect
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
from container_fuzz.files import make_file
from container_fuzz.judge import DisagreementError, judge

from deepinfer_prep.files import container


@click.group()
def main() -> None:
    """Compare the project's reader of safetensors files with the library's on files made to confuse it."""


@main.command("random")
@click.option("--seconds", type=float, default=60, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def random_files(seconds: float, seed: int) -> None:
    """Judge mutated files until the time is up, and count the verdicts."""
    choices, verdicts, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        content = make_file(choices)
        try:
            verdicts[judge(content)] += 1
        except DisagreementError as error:
            path = Path("disagreement.safetensors")
            path.write_bytes(content)
            raise click.ClickException(f"after {verdicts.total():,} files: {error}\nkept as {path}") from error
    click.echo(f"{verdicts.total():,} files, no disagreement")
    for verdict, count in verdicts.most_common():
        click.echo(f"{count:12,} {verdict}")


@main.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.pass_context
def guided(context: click.Context) -> None:
    """Let atheris choose the bytes; further arguments go to libFuzzer (-runs, -max_total_time, a corpus folder)."""
    try:
        import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise click.ClickException("atheris is not installed: pip install atheris") from None
    for name, function in inspect.getmembers(container, inspect.isfunction):
        if function.__module__ == container.__name__:
            setattr(container, name, atheris.instrument_func(function))

    def judge_input(data: bytes) -> None:
        judge(data[1:] if data[:1] == b"r" else make_file(_Choices(data)))

    atheris.Setup([sys.argv[0], *context.args], judge_input)
    atheris.Fuzz()


class _Choices(random.Random):
    """Choices that come from the fuzzer's bytes; zeros once they are used up."""

    def __new__(cls, data: bytes) -> Any:
        return super().__new__(cls)

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._position = data, 0

    def getrandbits(self, count: int) -> int:
        size = (count + 7) // 8
        piece = self._data[self._position : self._position + size]
        self._position += size
        return int.from_bytes(piece.ljust(size, b"\0"), "little") & ((1 << count) - 1)

    def random(self) -> float:
        return self.getrandbits(53) / (1 << 53)


if __name__ == "__main__":
    main()

"""Modelled time of the kernels on DeepSeek-V4.1's shapes: what bounds each, beside the time to read memory once.

    python scripts/kernel_cost.py              # everything, as Markdown tables
    python scripts/kernel_cost.py --engines    # with the busy time of every engine

The kernels run on the emulator without arithmetic; its record of instructions goes through the cost model in
tests/nki_emulator/cost.py. A model, not measured on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import click

sys.path.extend(str(Path(__file__).resolve().parents[1] / part) for part in ("", "tests"))
from nki_emulator.cost import ENGINES

from tests.kernels.cases import GEMMS
from tests.kernels.models import ROWS, V41_FP4, V41_FP8, Modelled, gemm_model, hyper_connection_models


def _gemm_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    for gemm in GEMMS:
        for weight, (n, k) in (V41_FP4 if gemm.codes_per_byte == 2 else V41_FP8).items():
            models = [gemm_model(gemm, m, n, k, cores) for m in rows]
            yield f"{gemm.name} | {weight} [{n}, {k}] | {models[0].floor * 1e6:.1f}", models


def _hc_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    by_tokens = [hyper_connection_models(tokens, cores) for tokens in rows]
    for name in by_tokens[0]:
        yield name, [models[name] for models in by_tokens]


def _print(title: str, lines: Iterable[tuple[str, list[Modelled]]], rows: tuple[int, ...], engines: bool) -> None:
    print(f"| {title} | {' | '.join(f'm = {m}' for m in rows)} |")
    print("|---" * (title.count("|") + 1 + len(rows)) + "|")
    for label, models in lines:
        print(f"| {label} | {' | '.join(model.cell() for model in models)} |", flush=True)
        for m, model in zip(rows, models, strict=True) if engines else ():
            busy = model.cost.slowest.seconds
            print(f"    m = {m}: " + ", ".join(f"{name} {busy[name] * 1e6:.1f}" for name in ENGINES))
    print()


@click.command()
@click.option("--rows", default=",".join(map(str, ROWS)), show_default=True, help="Rows of x (tokens), by commas.")
@click.option("--cores", type=click.IntRange(1, 2), default=2, show_default=True)
@click.option("--engines", is_flag=True, help="Also print the busy time of every engine, in microseconds.")
def main(rows: str, cores: int, engines: bool) -> None:
    """Print modelled microseconds, their ratio to the floor that memory sets, and what bounds each kernel."""
    counts = tuple(int(m) for m in rows.split(","))
    print(f"Model, not measured on a device. {cores} core(s). Microseconds (ratio to the floor, what bounds it),")
    print("with the published figures at their best / with what they leave open at its worst.\n")
    _print("kernel | weight | floor", _gemm_rows(counts, cores), counts, engines)
    _print("kernel", _hc_rows(counts, cores), counts, engines)


if __name__ == "__main__":
    main()

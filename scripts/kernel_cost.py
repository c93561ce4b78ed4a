"""Modelled time of the kernels on DeepSeek-V4.1's shapes: what bounds each, beside the time to read memory once.

    python scripts/kernel_cost.py              # everything, as Markdown tables
    python scripts/kernel_cost.py --engines    # with the busy time of every engine
    python scripts/kernel_cost.py --tables index,pool,fusions   # some of the tables

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

from deepinfer_prep.kernels.constants import WINDOW_TILE
from tests.kernels.attention_models import compressed_model, dense_window_model, window_list_model
from tests.kernels.cases import GEMMS
from tests.kernels.fusions import FUSIONS, verdict
from tests.kernels.models import HIDDEN, ROWS, V41_FP4, V41_FP8, Modelled, gemm_model, hyper_connection_models
from tests.kernels.small_models import (
    CANDIDATES,
    CONTEXTS,
    LATENT,
    candidates_model,
    expert_model,
    index_model,
    norm_model,
    pool_model,
    swiglu_model,
    top_k_rounds,
)

TABLES = ("gemm", "hc", "norm", "pool", "index", "candidates", "topk", "attention", "fusions")


def _gemm_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    for gemm in GEMMS:
        for weight, (n, k) in (V41_FP4 if gemm.codes_per_byte == 2 else V41_FP8).items():
            models = [gemm_model(gemm, m, n, k, cores) for m in rows]
            yield f"{gemm.name} | {weight} [{n}, {k}] | {models[0].floor * 1e6:.1f}", models


def _hc_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    by_tokens = [hyper_connection_models(tokens, cores) for tokens in rows]
    for name in by_tokens[0]:
        yield name, [models[name] for models in by_tokens]


def _norm_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    for columns in (HIDDEN, LATENT):
        yield f"rmsnorm, d = {columns}", [norm_model(m, columns, cores) for m in rows]
    yield "fp4_expert", [expert_model(m, cores) for m in rows]
    yield "swiglu, h = 2304", [swiglu_model(m, cores=cores) for m in rows]


def _pool_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    for ratio in (2, 4, 128):
        yield f"compress_pool, ratio {ratio}", [pool_model(m, ratio, cores=cores) for m in rows]


def _index_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    for name, tokens in CONTEXTS.items():
        for ratio in (2, 1):
            entries = tokens // ratio
            yield (
                f"index_score, one sequence | {name}, ratio {ratio}",
                [index_model(m, entries, 1, cores) for m in rows],
            )
        yield f"index_score, m sequences | {name}, ratio 2", [index_model(m, tokens // 2, m, cores) for m in rows]


def _attention_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    yield "sparse_attn, window only", [window_list_model(m, cores=cores) for m in rows]
    for name, tokens in CONTEXTS.items():
        yield f"sparse_attn_two_caches, {name}", [compressed_model(m, tokens // 2, cores) for m in rows]
    tiles = [-(-m // WINDOW_TILE) * WINDOW_TILE for m in rows]
    yield "window_attn, in tiles of 64", [dense_window_model(m, cores) for m in tiles]


def _candidate_rows(rows: tuple[int, ...], cores: int) -> Iterable[tuple[str, list[Modelled]]]:
    for name, tokens in CONTEXTS.items():
        if tokens > 8 * CANDIDATES:
            models = [candidates_model(m, tokens, m, cores) for m in rows]
            yield f"index_candidates, 16,384 entries a query | {name}, ratio 1", models


def _print_top_k(rows: tuple[int, ...]) -> None:
    print("Finding the 512 best of every query's entries, eight a round, on one core; microseconds.")
    print(f"| entries | {' | '.join(f'm = {m}' for m in rows)} |")
    print("|---" * (len(rows) + 1) + "|")
    for entries in (4096, 16384, 65536, 131072, 1048576):
        print(f"| {entries} | {' | '.join(f'{top_k_rounds(m, entries) * 1e6:.0f}' for m in rows)} |")
    print()


def _print_fusions(rows: tuple[int, ...]) -> None:
    print(f"| steps | {' | '.join(f'm = {m}' for m in rows)} | pays |")
    print("|---" * (len(rows) + 2) + "|")
    for fusion in FUSIONS:
        verdicts = [verdict(fusion, m) for m in rows]
        cells = []
        for one in verdicts:
            ways = zip(one.kernels, one.mixed, one.fused, strict=True)
            cells.append(" / ".join(" ".join(f"{seconds * 1e6:.0f}" for seconds in column) for column in ways))
        pays = "yes" if all(one.pays for one in verdicts) else "no"
        print(f"| {fusion.name} | {' | '.join(cells)} | {pays} |", flush=True)
    print()


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
@click.option("--tables", default=",".join(TABLES), show_default=True, help="Which tables, by commas.")
def main(rows: str, cores: int, engines: bool, tables: str) -> None:
    """Print modelled microseconds, their ratio to the floor that memory sets, and what bounds each kernel."""
    counts = tuple(int(m) for m in rows.split(","))
    print(f"Model, not measured on a device. {cores} core(s). Microseconds (ratio to the floor, what bounds it),")
    print("with the published figures at their best / with what they leave open at its worst.\n")
    makers = {
        "gemm": _gemm_rows,
        "hc": _hc_rows,
        "norm": _norm_rows,
        "pool": _pool_rows,
        "index": _index_rows,
        "candidates": _candidate_rows,
        "attention": _attention_rows,
    }
    titles = {"gemm": "kernel | weight | floor", "index": "kernel | context", "candidates": "kernel | context"}
    for table in tables.split(","):
        if table == "fusions":
            print(
                "Kernels for all steps, kernels only where torch has none, one kernel; each with its calls, two cores."
            )
            _print_fusions(counts)
        elif table == "topk":
            _print_top_k(counts)
        else:
            _print(titles.get(table, "kernel"), makers[table](counts, cores), counts, engines)


if __name__ == "__main__":
    main()

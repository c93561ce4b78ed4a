"""Check the GEMM kernels on DeepSeek-V4.1's full shapes against float64.

    python scripts/check_kernels.py                                   # all shapes and rows: about half an hour
    python scripts/check_kernels.py --weight wkv --rows 1,16 --fill "all codes"

Every result must meet the bound of tests.kernels.cases.error_ratio, and one core must agree with two bit for bit. Runs
on AWS's simulator where its `nki` is installed, on the emulator elsewhere; says which.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / part) for part in ("", "tests"))
from nki_emulator import run

from tests.kernels.cases import FILLS, GEMMS, Gemm, error_ratio, make_case
from tests.kernels.models import V41_FP4, V41_FP8

ROWS = (1, 3, 16, 32, 64, 128, 200, 512)


def check_weight(gemm: Gemm, name: str, n: int, k: int, rows: tuple[int, ...], fill: str) -> bool:
    """Check one kernel on one weight for every number of rows; print a line for each. Whether all is well."""
    fine = True
    weights = None
    for m in rows:
        case = make_case(gemm, m, n, k, fill)
        weights = gemm.dequantize(case.w, case.scale, torch.float64) if weights is None else weights
        start = time.perf_counter()
        two = run(gemm.kernel(2), *case.arguments, grid=2)
        seconds = time.perf_counter() - start
        one = run(gemm.kernel(1), *case.arguments)
        ratio, equal = error_ratio(gemm, case, two.output, weights), torch.equal(one.output, two.output)
        fine &= ratio <= 1.0 and equal
        verdict = "ok" if ratio <= 1.0 and equal else "WRONG"
        agree = "one core = two" if equal else "one core differs from two"
        print(
            f"{verdict:5} {gemm.name:20} {name:14} [{n}, {k}] m={m:<3} error {ratio:.4f} of the bound, {agree}, "
            f"{two.backend} {seconds:.1f} s",
            flush=True,
        )
    return fine


@click.command()
@click.option("--weight", "only", multiple=True, help="Only weights whose name contains this; may be repeated.")
@click.option("--kernel", "kernels", multiple=True, help="Only these kernels; may be repeated.")
@click.option("--rows", default=",".join(map(str, ROWS)), show_default=True, help="Rows of x, separated by commas.")
@click.option("--fill", type=click.Choice(FILLS), default="random", show_default=True)
def main(only: tuple[str, ...], kernels: tuple[str, ...], rows: str, fill: str) -> None:
    """Check kernels on full shapes; exit status 1 if one is wrong."""
    counts = tuple(int(m) for m in rows.split(","))
    results = [
        check_weight(gemm, name, n, k, counts, fill)
        for gemm in GEMMS
        if not kernels or gemm.name in kernels
        for name, (n, k) in (V41_FP4 if gemm.codes_per_byte == 2 else V41_FP8).items()
        if not only or any(part in name for part in only)
    ]
    if not results:
        raise click.UsageError("no kernel and weight match")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

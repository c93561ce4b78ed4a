"""The table in docs/families.md, made by converting every fixture: `python tests/families/table.py` writes it."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "scripts")]

from tests.families.judges import JUDGES
from tests.families.layouts import LAYOUTS
from tests.families.outcomes import Outcome, convert_layout

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEAD = ("Family", "Recognised as", "Halved", "Doubled", "Kernel scale", "Static scales doubled", "Tested with")


def table(outcomes: Mapping[str, Outcome]) -> str:
    """One row a fixture; every cell is what the conversion did."""
    rows = [HEAD, tuple("---" for _ in HEAD), *(_row(name, outcomes[name]) for name in LAYOUTS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def read_table() -> str:
    """The table that the document holds now."""
    return DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def _row(name: str, outcome: Outcome) -> tuple[str, ...]:
    judge = f", judged by {JUDGES[name][0].replace('_', '-')}" if name in JUDGES else ""
    cells = (f"refused: {_reason(outcome)}", "-", "-", "-") if outcome.refusal else _converted_cells(outcome)
    return LAYOUTS[name].family, outcome.plan.family, *cells, f"`{name}`{judge}"


def _reason(outcome: Outcome) -> str:
    """The start of each sentence of the refusal, without names."""
    parts = outcome.refusal.splitlines()
    return "; ".join(part.partition(": ")[0] for part in parts if part.startswith("F8_E4M3 tensors that"))


def _converted_cells(outcome: Outcome) -> tuple[str, str, str, str]:
    weights = outcome.layout.weights
    if not weights:
        return "nothing: copied as it is", "nothing", "-", _count(len(outcome.manifest.activation_scales))
    source, output = outcome.source_tensors, outcome.output_tensors
    halved = sum(source[weight.name].data != output[weight.name].data for weight in weights)
    doubled = Counter(source[name].dtype for name in outcome.layout.scales if source[name].data != output[name].data)
    return (
        f"{halved} of {len(weights)}",
        ", ".join(f"{count} {dtype}" for dtype, count in doubled.items()),
        "; ".join(_kernel_scales(outcome)),
        _count(len(outcome.manifest.activation_scales)),
    )


def _kernel_scales(outcome: Outcome) -> Iterator[str]:
    records = outcome.manifest.weights.values()
    stored = sum(record.kernel_scale == record.scale for record in records)
    derived = sum(record.kernel_scale not in (None, record.scale) for record in records)
    if stored:
        yield f"{stored} stored"
    if derived:
        yield f"{derived} derived"
    for reason, count in Counter(record.reason for record in records if record.kernel_scale is None).items():
        yield f"{count} none: {reason}"


def _count(number: int) -> str:
    return str(number) if number else "-"


def _outcomes(folder: Path, names: Iterable[str]) -> dict[str, Outcome]:
    return {name: convert_layout(name, folder / name) for name in names}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = table(_outcomes(Path(folder), LAYOUTS))
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")

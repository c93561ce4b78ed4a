"""Puts a report into one self-contained HTML page that fetches nothing and lets no tensor name act.

The page's Content-Security-Policy allows its own two scripts, by their digests, and no connection at all. Every
name is shown as text: HTML and JSON are escaped, and characters that would hide or reorder text are spelled out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.sizes import format_size
from deepinfer_prep.report.codes import CodeFigures, Ways
from deepinfer_prep.report.figures import Distribution, OutputFacts, Report, TensorRow

_MOST_REMARKS = 200
_BADGES = {
    "ready": "can be converted",
    "nothing to do": "nothing to convert",
    "refused": "refused",
    "finished": "converted",
    "damaged": "damaged",
}


def render_page(report: Report) -> str:
    """The whole page as HTML text.

    Raises:
        PrepError: plotly, which draws the figures, is not installed.
    """
    plotly, script = _plotly(), _asset("page.js")
    parts = {
        "policy": _policy(plotly, script),
        "style": _asset("page.css"),
        "title": _html(report.path.resolve().name),
        "status": report.verdict.status.replace(" ", "-"),
        "badge": _BADGES[report.verdict.status],
        "verdict": _html(report.verdict.sentence),
        "facts": _facts(report),
        "problems": _problems(report),
        "output": "" if report.output is None else _output(report.output),
        "sizes": _sizes(report),
        "kernels": _kernels(report),
        "accuracy-note": _accuracy_note(report),
        "table-note": _table_note(report),
        "version": _html(report.tool_version),
        "data": _embedded(_data(report)),
        "plotly": plotly,
        "script": script,
    }
    # One pass, so that a marker inside a name stays what it is.
    return re.sub(r"\{\{([a-z-]+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def visible(text: str) -> str:
    """The text with control, format, bidirectional and unassigned characters spelled out as escapes."""
    return "".join(
        f"\\u{{{ord(character):x}}}" if unicodedata.category(character) in _HIDDEN else character for character in text
    )


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def require_plotly() -> None:
    """Check that pages can be made, before time is spent on reading.

    Raises:
        PrepError: plotly, which draws the figures, is not installed.
    """
    if find_spec("plotly") is None:
        raise PrepError(
            "the page needs plotly, which is not installed: pip install 'deepinfer-prep[report]'. With --json alone "
            "the figures are printed without it.",
            code="no-plotly",
        )


def _plotly() -> str:
    require_plotly()
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    # Digests are taken of what a browser sees, and it reads every line break as one line feed.
    return text.replace("\r\n", "\n").replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return (files("deepinfer_prep.report") / name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _html(text: str) -> str:
    return escape(visible(text))


def _embedded(data: Any) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _facts(report: Report) -> str:
    facts = [
        ("path", str(report.path)),
        ("format", report.family),
        ("size", f"{format_size(report.bytes)} in {report.files:,} files"),
        ("tensors", f"{report.tensors_in_all:,}"),
    ]
    return "".join(f"<div><dt>{_html(name)}</dt><dd>{_html(value)}</dd></div>" for name, value in facts)


def _problems(report: Report) -> str:
    what = "Why it is refused" if report.subject == "checkpoint" else "What differs"
    return _remarks(what, "refusals", report.refusals) + _remarks("Warnings", "warnings", report.warnings)


def _remarks(title: str, name: str, remarks: tuple[str, ...]) -> str:
    if not remarks:
        return ""
    items = "".join(f"<li>{_html(remark)}</li>" for remark in remarks[:_MOST_REMARKS])
    more = len(remarks) - _MOST_REMARKS
    rest = f"<p>and {more:,} more; <code>--json</code> has all.</p>" if more > 0 else ""
    return f'<section class="remarks {name}" id="{name}"><h2>{title}</h2><ul>{items}</ul>{rest}</section>'


def _output(output: OutputFacts) -> str:
    noise = "" if output.halving_decibels is None else f" (signal-to-noise ratio {output.halving_decibels:.1f} dB)"
    chosen = {name: value for name, value in output.options.items() if value not in (False, "", [], (), None)}
    facts = [
        ("made by", f"deepinfer-prep {output.tool_version}, format {output.format_version}"),
        ("brought into range", f"{output.above_240:,} codes that lay above 240"),
        ("rounded", f"{output.rounded:,} codes, each by half a step of the smallest magnitudes{noise}"),
        ("NaN codes kept", f"{output.nan:,}"),
        ("options", ", ".join(f"{name}: {_option(value)}" for name, value in chosen.items()) or "none"),
        ("source", f"fingerprint {output.source_fingerprint}"),
        ("verified", _verified(output)),
    ]
    rows = "".join(f"<tr><th>{_html(name)}</th><td>{_html(value)}</td></tr>" for name, value in facts)
    return f'<section id="output"><h2>What was done</h2><table class="plain">{rows}</table></section>'


def _option(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _verified(output: OutputFacts) -> str:
    found = output.verification
    if found is None:
        return "not known to this report: run deepinfer-prep verify with --report FILE and give FILE as --verification"
    result = "no difference" if found.differences == 0 else f"{found.differences:,} differences"
    against = f"against {found.source}, byte by byte" if found.source else "without its source"
    outdated = "; the output was written anew since, so verify it again" if found.outdated else ""
    return f"{found.when}, {against}: {result}{outdated}"


def _sizes(report: Report) -> str:
    head = ("kind", "dtype", "scale", "count", "size", "convert" if report.subject == "checkpoint" else "done")
    rows = (
        (row.kind, row.dtype, row.scale, f"{row.tensors:,}", format_size(row.bytes), row.action) for row in report.sizes
    )
    return _table(head, rows, numeric={"count", "size"})


def _kernels(report: Report) -> str:
    if not report.kernels:
        return "<p>There is no quantized weight.</p>"
    head = ("kernel scale", "weights", "size", "why", "for example")
    rows = ((row.state, f"{row.weights:,}", format_size(row.bytes), row.reason, row.example) for row in report.kernels)
    return _table(head, rows, numeric={"weights", "size"})


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], numeric: set[str]) -> str:
    def cells(row: tuple[str, ...], tag: str) -> Iterator[str]:
        for title, cell in zip(head, row, strict=True):
            kind = ' class="number"' if title in numeric else ""
            yield f'<{tag}{kind} data-title="{title}">{_html(cell)}</{tag}>'

    title = "".join(cells(head, "th"))
    body = "".join(f"<tr>{''.join(cells(row, 'td'))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{title}</tr></thead><tbody>{body}</tbody></table></div>'


def _accuracy_note(report: Report) -> str:
    if report.total is None:
        return "The codes were not read. Leave out --headers-only to see this."
    if report.subject == "output":
        return (
            "An output holds the halves alone, from which the recipe cannot be computed. A report of the source "
            "compares them."
        )
    if not report.total.codes:
        return "There is no fp8 weight."
    changed = report.total.changed
    share = 100 * changed.recipe / report.total.codes if changed is not None and changed.recipe else 0.0
    return (
        f"The recipe multiplies by 240/448 in bf16 and rounds again: it changes {share:.1f} % of the codes. Clipping "
        "replaces all beyond 240 by 240. More decibels are better; 6 dB halve the error."
    )


def _table_note(report: Report) -> str:
    shown = len(report.tensors)
    beside = "the figures of scales stand beside their weights."
    if shown == report.rows_in_all:
        return f"All {shown:,} tensors that are no scales; {beside}"
    return (
        f"{shown:,} of {report.rows_in_all:,} tensors that are no scales, the largest ones; {beside} "
        "--tensor PATTERN adds others."
    )


def _data(report: Report) -> dict[str, Any]:
    """What the page's script draws, in columns, with no more digits than a picture shows."""
    return {
        "subject": report.subject,
        "sizes": [[row.kind, row.scale or row.dtype, row.tensors, row.bytes, row.action] for row in report.sizes],
        "map": _map(report),
        "distributions": [_distribution(item) for item in report.distributions],
        "accuracy": [
            [visible(item.name), *_ways(item.figures.decibels)]
            for item in report.distributions
            if item.scope != "tensor" and item.figures.decibels is not None and item.figures.codes
        ],
        "tensors": _tensors(report.tensors),
    }


def _distribution(item: Distribution) -> list[Any]:
    # A row of counts, most of them zero for a small tensor, is shortest with its end left off.
    counts = list(item.counts)
    while counts and not counts[-1]:
        counts.pop()
    return [item.scope, visible(item.name), counts]


def _map(report: Report) -> dict[str, Any]:
    cells = [
        [
            cell.kind,
            cell.column,
            cell.tensors,
            *(_counts(cell.codes)),
            *((cell.scale.smallest, cell.scale.median, cell.scale.largest) if cell.scale else (None, None, None)),
        ]
        for cell in report.map.cells
    ]
    return {"kinds": [*map(visible, report.map.kinds)], "columns": report.map.columns, "cells": cells}


def _counts(figures: CodeFigures | None) -> tuple[int | None, int | None, int | None]:
    """Codes, how many lay above 240 in the source, how many are rounded."""
    if figures is None:
        return None, None, None
    above = figures.above_240 if figures.brought_into_range is None else figures.brought_into_range
    return figures.codes, above, figures.rounded


def _ways(ways: Ways | None) -> tuple[float | None, float | None, float | None]:
    if ways is None:
        return None, None, None
    return _short(ways.halving), _short(ways.recipe), _short(ways.clipping)


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _tensors(rows: tuple[TensorRow, ...]) -> dict[str, Any]:
    """The table by columns; words that repeat are given once and referred to by their position."""
    distinct = (dict.fromkeys(_words(row)[column] for row in rows) for column in range(3))
    at = [{word: position for position, word in enumerate(words)} for words in distinct]
    return {
        "words": [[*map(visible, words)] for words in at],
        "rows": [
            [
                visible(row.name),
                *(places[word] for places, word in zip(at, _words(row), strict=True)),
                "x".join(map(str, row.shape)),
                row.bytes,
                *_counts(row.codes),
                *_ways(row.codes.decibels if row.codes else None),
                *((row.scale.smallest, row.scale.median, row.scale.largest) if row.scale else (None, None, None)),
            ]
            for row in rows
        ],
    }


def _words(row: TensorRow) -> tuple[str, str, str]:
    return row.role, row.dtype, f"{row.kernel}: {row.kernel_reason}" if row.kernel_reason else row.kernel

"""Results as text for people and as plain data for JSON. Decides nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from deepinfer_prep.cli.printable import printable
from deepinfer_prep.convert import ConversionResult
from deepinfer_prep.files.sizes import format_size
from deepinfer_prep.files.storage import StoredPlace
from deepinfer_prep.inspect import Inspection
from deepinfer_prep.verify import VerificationResult
from deepinfer_prep.writing.preflight import unscaled_sentence

_MOST_DIFFERENCES = 20
_MOST_REMARKS = 30
_JSON_NAMES = {"above_240": "misread"}
"""Fields whose key in JSON output is another one, which programs rely on."""


def to_data(value: Any) -> Any:
    """A result as dicts, lists, numbers and text."""
    if is_dataclass(value):
        return {_JSON_NAMES.get(field.name, field.name): to_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    return str(value) if isinstance(value, (Path, StoredPlace)) else value


def inspection_text(result: Inspection) -> str:
    """The report of `inspect`."""
    lines = [
        f"{result.root}: {result.family}, {result.shards:,} shards, {result.tensors:,} tensors, "
        f"{format_size(result.source_bytes)}",
        "",
        *_table(
            ("kind", "dtype", "scale", "count", "size", "convert"),
            [
                (row.kind, row.dtype, row.scale, f"{row.tensors:,}", format_size(row.bytes), row.action)
                for row in result.kinds
            ],
        ),
        "",
        f"output         {format_size(result.output_bytes)}, and a sidecar of at most "
        f"{format_size(result.sidecar_bytes)}",
        f"memory         {format_size(result.buffer_bytes)} of buffers, whatever the size of the model",
        _static_scales_line(len(result.activation_scales)),
        *_layout_lines(len(result.laid_out)),
        *_kernel_scale_lines(result.kernel_scales, result.no_kernel_scale),
    ]
    if result.scan is not None:
        scan = result.scan
        lines += [
            f"fp8 codes      {scan.codes:,} read: {scan.above_240:,} above 240, {scan.nan:,} NaN, "
            f"{scan.rounded:,} that halving rounds",
        ]
        if result.unscaled:
            lines.append(unscaled_sentence(len(result.unscaled), scan.unscaled_bytes, scan.unsafe))
    return _page([*lines, *_remarks(result.warnings, result.refusals)])


def conversion_text(result: ConversionResult) -> str:
    """The report of `convert`."""
    counts = result.counts
    lines = [
        f"{result.output}: {result.files:,} files, {result.tensors:,} tensors, {format_size(result.output_bytes)} "
        f"in {result.seconds:.1f} s ({format_size(int(result.output_bytes / max(result.seconds, 1e-9)))}/s)",
    ]
    if result.resumed_bytes:
        lines.append(f"resumed        {format_size(result.resumed_bytes)} of an interrupted run were kept")
    lines += [
        f"fp8 codes      {counts.above_240:,} above 240 brought into range, {counts.rounded:,} rounded, "
        f"{counts.nan:,} NaN",
        f"split          {result.split:,} matrices into bf16 hi + lo",
        _static_scales_line(result.activation_scales),
        *_layout_lines(result.laid_out),
        *_kernel_scale_lines(result.kernel_scales, result.no_kernel_scale),
    ]
    return _page([*lines, *_remarks(result.warnings, ())])


def verification_text(result: VerificationResult) -> str:
    """The report of `verify`."""
    lines = [
        f"{result.output}: {result.files:,} files, {result.tensors:,} tensors, {result.quantized_weights:,} quantized "
        f"weights, {result.sidecar_tensors:,} sidecar tensors, {format_size(result.bytes_read)} read in "
        f"{result.seconds:.1f} s",
        f"source         {result.source or 'not given: digests, codes, scales and sidecar were checked'}",
    ]
    if result.nan_codes:
        lines.append(
            f"NaN codes      {result.nan_codes:,}{', as in the source' if result.source and result.ok else ''}"
        )
    lines += [f"option         {name}: {json.dumps(value)} (says the output)" for name, value in result.options.items()]
    if result.ok:
        return _page([*lines, "verified: no difference"])
    lines += [f"DIFFERS: {result.differences:,} differences", *map(str, result.first[:_MOST_DIFFERENCES])]
    if result.differences > _MOST_DIFFERENCES:
        lines.append("... (`--report FILE` holds the first 100)")
    return _page(lines)


def _page(lines: Iterable[str]) -> str:
    """Lines as they are printed: names in them cannot begin a new one."""
    return "\n".join(map(printable, lines))


def _static_scales_line(count: int) -> str:
    return f"static scales  {f'{count:,}' if count else 'none'} of e4m3 activations or of an fp8 KV cache"


def _layout_lines(count: int) -> Iterator[str]:
    if count:
        yield f"layout         {count:,} weights in the kernels' order, each stored as U8 under its name with .nki"


def _kernel_scale_lines(kinds: Mapping[str, int], reasons: Sequence[str]) -> Iterator[str]:
    for position, (kind, count) in enumerate(sorted(kinds.items(), key=lambda item: -item[1])):
        label = "kernel scales" if position == 0 else ""
        yield f"{label:<14} {count:,} {f'none: {kind}' if kind in reasons else kind}"


def _remarks(warnings: Sequence[str], refusals: Sequence[str]) -> Iterator[str]:
    for kind, sentences in (("warning", warnings), ("refused", refusals)):
        yield from (f"{kind}: {sentence}" for sentence in sentences[:_MOST_REMARKS])
        if len(sentences) > _MOST_REMARKS:
            yield f"{kind}: and {len(sentences) - _MOST_REMARKS:,} more (`--json` lists all)"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    numeric = {"count", "size"}
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        cells = (
            cell.rjust(width) if title in numeric else cell.ljust(width)
            for cell, width, title in zip(row, widths, head, strict=True)
        )
        yield "  ".join(cells).rstrip()

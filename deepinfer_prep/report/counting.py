"""Adds up the counts of every fp8 tensor and scale: in all, by kind and layer, and of the tensors that are shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.families.patterns import compile_pattern
from deepinfer_prep.options import Options
from deepinfer_prep.report.byte_counts import I64
from deepinfer_prep.report.codes import CodeFigures, halved_figures, source_figures
from deepinfer_prep.report.figures import ScaleFigures
from deepinfer_prep.report.histograms import ScaleCounts, count_tensors
from deepinfer_prep.report.layer_map import MapBuilder, scale_figures
from deepinfer_prep.report.subject import Subject
from deepinfer_prep.workers import ProgressCallback

MOST_ROWS = 5_000
"""The table holds this many tensors, the largest ones, beside those that were asked for."""
MOST_DISTRIBUTIONS = 60
"""So many tensors, the largest ones, have their distribution shown, beside those that were asked for."""
MOST_ASKED = 500
"""Of the tensors that were asked for, so many are shown."""


@dataclass(slots=True)
class Counted:
    """What reading gave; everything is empty after headers alone."""

    listed: tuple[str, ...]
    """Tensors of the table, largest first; scales stand beside their weights."""
    listed_names: frozenset[str]
    candidates: int
    """Of how many tensors they were chosen."""
    shown: frozenset[str]
    """Those of them whose distribution is kept."""
    map: MapBuilder
    total: I64 = field(default_factory=lambda: np.zeros(256, dtype=np.int64))
    """Counts of all fp8 weights."""
    bad_codes: int = 0
    """Codes above 240 in all fp8 tensors."""
    codes: dict[str, CodeFigures] = field(default_factory=dict)
    """By name, of the tensors listed."""
    distributions: dict[str, I64] = field(default_factory=dict)
    """By name, of the tensors shown."""
    scales: dict[str, ScaleFigures | None] = field(default_factory=dict)
    """By the name of the scale."""
    all_powers: dict[str, bool] = field(default_factory=dict)
    """Whether every value of a scale is a positive power of two, by the name of the scale."""


def count_subject(
    subject: Subject,
    options: Options,
    headers_only: bool,
    asked: tuple[str, ...],
    workers: int,
    chunk_size: int,
    progress: ProgressCallback | None,
) -> Counted:
    """Choose the tensors to show and, unless headers alone are wanted, read and count every fp8 tensor and scale."""
    weights = {weight.name: weight for weight in subject.weights}
    aggregated = [*weights]
    if subject.manifest is None and options.unscaled == "refuse":
        # Copied ones are not halved, so that counting them among the weights would be wrong.
        aggregated += subject.unscaled
    counted = _choose(subject, asked, MapBuilder(subject.tensors[name].tensor for name in aggregated))
    if headers_only:
        return counted
    in_total = set(aggregated)
    weights_of: dict[str, list[str]] = {}
    for weight in subject.weights:
        weights_of.setdefault(weight.scale, []).append(weight.name)
    fp8_names = [weight.name for weight in subject.weights if weight.element == "e4m3"] + [*subject.unscaled]
    for found in count_tensors(
        (subject.tensors[name] for name in fp8_names),
        (subject.tensors[name] for name in weights_of),
        workers,
        chunk_size,
        progress,
    ):
        if found.codes is not None:
            halved = subject.manifest is not None and found.name in weights
            _add_codes(counted, found.name, found.codes, halved, found.name in in_total)
        if found.scales is not None:
            _add_scales(counted, found.name, found.scales, weights_of[found.name])
    return counted


def _choose(subject: Subject, asked: tuple[str, ...], layer_map: MapBuilder) -> Counted:
    scales = {weight.scale for weight in subject.weights}
    by_size = sorted(
        (name for name in subject.tensors if name not in scales),
        key=lambda name: (-subject.tensors[name].tensor.nbytes, name),
    )
    patterns = [compile_pattern(pattern) for pattern in asked]
    wanted = {*islice((name for name in by_size if any(p.fullmatch(name) for p in patterns)), MOST_ASKED)}
    listed = tuple(name for place, name in enumerate(by_size) if place < MOST_ROWS or name in wanted)
    fp8_names = {weight.name for weight in subject.weights if weight.element == "e4m3"} | {*subject.unscaled}
    largest = islice((name for name in by_size if name in fp8_names), MOST_DISTRIBUTIONS)
    return Counted(listed, frozenset(listed), len(by_size), frozenset({*largest, *(wanted & fp8_names)}), layer_map)


def _add_codes(counted: Counted, name: str, codes: I64, halved: bool, in_total: bool) -> None:
    counted.bad_codes += int(codes[list(fp8.ABOVE_240_CODES)].sum())
    if in_total:
        counted.total += codes
        counted.map.add_codes(name, codes)
    if name in counted.listed_names:
        counted.codes[name] = (halved_figures if halved else source_figures)(codes)
    if name in counted.shown:
        counted.distributions[name] = codes


def _add_scales(counted: Counted, name: str, scales: ScaleCounts, weights: list[str]) -> None:
    counted.scales[name] = scale_figures(scales)
    counted.all_powers[name] = scales.all_powers
    for weight in weights:
        counted.map.add_scales(weight, scales)

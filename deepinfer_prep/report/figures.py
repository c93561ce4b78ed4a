"""The figures behind every picture of a report, as frozen dataclasses; `report --json` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from deepinfer_prep.files.storage import Place
from deepinfer_prep.inspect import KindRow
from deepinfer_prep.report.codes import CodeFigures

Status = Literal["ready", "nothing to do", "refused", "finished", "damaged"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for a reader who has no time."""

    status: Status
    sentence: str


@dataclass(frozen=True, slots=True)
class ScaleFigures:
    """Binary exponents, floor(log2(value)), of scale values; the median is the lower one of an even number."""

    values: int
    smallest: int | None
    median: int | None
    largest: int | None
    other: int
    """Values that are zero, negative, infinite or NaN, and have no exponent."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of the table."""

    name: str
    kind: str
    """The name with "*" for each of its numbers."""
    role: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    codes: CodeFigures | None
    scale: ScaleFigures | None
    kernel: str
    """"stored", "derived", "depends on values", "none", or empty where the tensor is no quantized weight."""
    kernel_reason: str


@dataclass(frozen=True, slots=True)
class MapCell:
    """The tensors of one kind in one column of layers; `kind` and `column` are positions in `LayerMap`."""

    kind: int
    column: int
    tensors: int
    codes: CodeFigures | None
    scale: ScaleFigures | None


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Kinds of quantized weights down, layers across; neighbouring layers share a column where there are many."""

    kinds: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[MapCell, ...]


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often each of the 256 codes occurs in all fp8 tensors, in a kind of them, or in one."""

    scope: Literal["all", "kind", "tensor"]
    name: str
    counts: tuple[int, ...]
    figures: CodeFigures


@dataclass(frozen=True, slots=True)
class KernelRow:
    """The weights whose kernel scale has the same state for the same reason; `example` is the largest of them."""

    state: str
    reason: str
    weights: int
    bytes: int
    example: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What the JSON report of `verify` says."""

    when: str
    """When that report was written, UTC."""
    differences: int
    source: str | None
    """The checkpoint that it was compared with byte by byte, if there was one."""
    outdated: bool
    """Whether the output's manifest is younger."""


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """How an output was made."""

    tool_version: str
    format_version: int
    options: Mapping[str, object]
    source_fingerprint: str
    rounded: int
    nan: int
    above_240: int
    """Codes of the source beyond 240."""
    halving_decibels: float | None
    """Signal-to-noise ratio of the halving; None where nothing was rounded or no codes were read."""
    verification: Verification | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the page shows."""

    path: Place
    subject: Literal["checkpoint", "output"]
    tool_version: str
    family: str
    files: int
    bytes: int
    codes_read: bool
    """Whether fp8 data was read, or headers alone."""
    verdict: Verdict
    sizes: tuple[KindRow, ...]
    total: CodeFigures | None
    map: LayerMap
    distributions: tuple[Distribution, ...]
    kernels: tuple[KernelRow, ...]
    warnings: tuple[str, ...]
    refusals: tuple[str, ...]
    """Why a checkpoint is refused, or where an output is not what its manifest says."""
    tensors: tuple[TensorRow, ...]
    """The asked-for tensors and the largest others; scales stand beside their weights."""
    tensors_in_all: int
    rows_in_all: int
    """Tensors that are no scales, of which `tensors` are some."""
    output: OutputFacts | None

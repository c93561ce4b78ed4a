"""Adds up tensors by kind and layer, within bounds that no set of names exceeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.report.byte_counts import I64
from deepinfer_prep.report.codes import CodeFigures
from deepinfer_prep.report.figures import LayerMap, MapCell, ScaleFigures
from deepinfer_prep.report.histograms import ScaleCounts
from deepinfer_prep.report.layers import kind_and_layer

MOST_KINDS = 40
"""Rows; where names have more kinds, the smallest share one row."""
MOST_COLUMNS = 128
"""Columns of layers; where there are more layers, neighbours share a column."""
OTHER_KINDS = "other kinds"
NO_LAYER = "none"
"""The column of tensors whose name holds no number."""


@dataclass(slots=True)
class _Sums:
    tensors: int
    codes: I64 | None = None
    scales: ScaleCounts = field(default_factory=ScaleCounts)


class MapBuilder:
    """Names fix the rows, the columns and how many tensors a cell has; counts are added tensor by tensor."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        sizes: Counter[str] = Counter()
        places: dict[str, tuple[str, int | None]] = {}
        for tensor in tensors:
            places[tensor.name] = kind_and_layer(tensor.name)
            sizes[places[tensor.name][0]] += tensor.nbytes
        named = [kind for kind, _ in sizes.most_common(MOST_KINDS if len(sizes) <= MOST_KINDS else MOST_KINDS - 1)]
        self._kinds = sorted(named) + ([OTHER_KINDS] if len(named) < len(sizes) else [])
        self._columns, column_of = _columns({layer for _, layer in places.values()})
        row_of = {kind: row for row, kind in enumerate(self._kinds)}
        last = len(self._kinds) - 1
        self._place_of = {name: (row_of.get(kind, last), column_of[layer]) for name, (kind, layer) in places.items()}
        self._sums = {place: _Sums(count) for place, count in Counter(self._place_of.values()).items()}

    def add_codes(self, name: str, codes: I64) -> None:
        """Add the counts of one of the tensors."""
        sums = self._sums[self._place_of[name]]
        sums.codes = codes.copy() if sums.codes is None else sums.codes + codes

    def add_scales(self, name: str, scales: ScaleCounts) -> None:
        """Add the scale of one of the tensors."""
        self._sums[self._place_of[name]].scales.add(scales)

    def kinds(self) -> dict[str, I64]:
        """The counts of codes of each kind that has any."""
        found: dict[str, I64] = {}
        for (row, _), sums in sorted(self._sums.items()):
            if sums.codes is not None:
                kind = self._kinds[row]
                found[kind] = found[kind] + sums.codes if kind in found else sums.codes.copy()
        return found

    def build(self, figures: Callable[[I64], CodeFigures]) -> LayerMap:
        """The finished map; `figures` turns counts of codes into figures."""
        cells = (
            MapCell(
                row,
                column,
                sums.tensors,
                None if sums.codes is None else figures(sums.codes),
                scale_figures(sums.scales),
            )
            for (row, column), sums in sorted(self._sums.items())
        )
        return LayerMap(tuple(self._kinds), tuple(self._columns), tuple(cells))


def _columns(layers: set[int | None]) -> tuple[list[str], dict[int | None, int]]:
    numbers = sorted(layer for layer in layers if layer is not None)
    together = math.ceil(len(numbers) / MOST_COLUMNS) if numbers else 1
    titles: list[str] = []
    column_of: dict[int | None, int] = {}
    for first in range(0, len(numbers), together):
        group = numbers[first : first + together]
        column_of |= dict.fromkeys(group, len(titles))
        titles.append(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}")
    if None in layers:
        column_of[None] = len(titles)
        titles.append(NO_LAYER)
    return titles, column_of


def scale_figures(counts: ScaleCounts) -> ScaleFigures | None:
    """Smallest, median and largest exponent; None where there are no values."""
    found = counts.by_exponent()
    usable = sum(found.values())
    if not usable + counts.other:
        return None
    if not usable:
        return ScaleFigures(counts.other, None, None, None, counts.other)
    exponents = [*found]
    reached = accumulate(found.values())
    median = next(exponent for exponent, below in zip(exponents, reached, strict=True) if 2 * below >= usable)
    return ScaleFigures(usable + counts.other, exponents[0], median, exponents[-1], counts.other)

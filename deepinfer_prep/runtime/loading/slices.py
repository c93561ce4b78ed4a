"""Parts of tensors: which experts, rows and columns a rank takes, and what of a scale goes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer_prep.errors import PrepError

Range = tuple[int, int]
"""Half-open: (0, 32) are the first 32."""

Bounds = tuple[Range, ...]
"""One range for every axis of a tensor."""


class SliceError(PrepError, ValueError):
    """A part does not lie in its tensor, or cuts through a block that shares one scale."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a tensor in its own elements; None takes an axis whole.

    `experts` is the first axis of a 3-D tensor, `rows` the last but one (the only one of a 1-D tensor) and
    `columns` the last one. A column of packed fp4 is a byte, which holds two values.
    """

    experts: Range | None = None
    rows: Range | None = None
    columns: Range | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.experts is None and self.rows is None and self.columns is None


WHOLE = Slice()


@dataclass(frozen=True, slots=True)
class Grid:
    """How a scale lies over its weight: one value for `block` rows and stored columns, `shape` values in all."""

    block: tuple[int, int] | None
    shape: tuple[int, ...]


def axis_of(kind: str, dimensions: int, where: str) -> int:
    """Which axis "experts", "rows" or "columns" is in a tensor of so many dimensions.

    Raises:
        SliceError: it has none of the kind.
    """
    if kind not in _AXES.get(dimensions, ()):
        raise SliceError(f"{where}: a tensor of {dimensions} dimensions has no {kind} to slice.")
    return _AXES[dimensions].index(kind)


def bounds_of(part: Slice, shape: tuple[int, ...], where: str) -> Bounds:
    """A range for every axis.

    Raises:
        SliceError: the tensor has no such axis or ends before; the message begins with `where`.
    """
    bounds = [(0, size) for size in shape]
    for kind in ("experts", "rows", "columns"):
        wanted: Range | None = getattr(part, kind)
        if wanted is None:
            continue
        axis = axis_of(kind, len(shape), where)
        start, stop = wanted
        if not 0 <= start <= stop <= shape[axis]:
            raise SliceError(f"{where}: {kind} {start} to {stop} do not lie in the shape {list(shape)}.")
        bounds[axis] = (start, stop)
    return tuple(bounds)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(stop - start for start, stop in bounds)


def part_shape(part: Slice, shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """The shape of a part of a tensor.

    Raises:
        SliceError: the part does not lie in the tensor.
    """
    return shape if part.is_whole else shape_of(bounds_of(part, shape, where))


def in_step(part: Slice, shape: tuple[int, ...], grid: Grid, where: str) -> Slice:
    """The part of a scale that belongs to a part of its weight.

    An axis with one scale value for all of it takes that value, whatever the part.

    Args:
        part: of the weight.
        shape: of the weight.
        grid: of the scale.
        where: begins the message of an error.

    Raises:
        SliceError: the part does not begin and end on block boundaries (or the weight's edge).
    """
    bounds_of(part, shape, where)
    if part.is_whole or math.prod(grid.shape) == 1:
        return WHOLE
    rows, columns = _axis_grids(shape, grid)
    row_part = _blocks(part.rows, shape[-2], rows, where, "rows")
    column_part = _blocks(part.columns, shape[-1], columns, where, "columns")
    if len(grid.shape) == len(shape):
        return Slice(part.experts, row_part, column_part)
    # One value a row or, in a stack of matrices, one a matrix.
    return Slice(rows=part.experts if len(shape) == 3 else row_part)


def share(size: int, unit: int, rank: int, world: int) -> Range:
    """What one rank of several takes of an axis: whole units, spread as evenly as they go, in order of ranks.

    The last unit may be cut short by the edge; a rank gets nothing where there are fewer units than ranks.

    Raises:
        SliceError: there is no such rank.
    """
    if not 0 <= rank < world:
        raise SliceError(f"rank {rank} of {world} does not exist: ranks count from 0 to {world - 1}.")
    units = math.ceil(size / unit)
    return min(size, units * rank // world * unit), min(size, units * (rank + 1) // world * unit)


def unit_of(kind: str, shape: tuple[int, ...], grid: Grid, where: str) -> int:
    """The "rows" or "columns" in whole multiples of which a weight may be cut, so that this scale can follow.

    Raises:
        SliceError: nothing states it.
    """
    if math.prod(grid.shape) == 1:
        return 1
    block, count = _axis_grids(shape, grid)[("rows", "columns").index(kind)]
    if count == 1:
        return 1
    if block is None:
        raise SliceError(_unstated(where, kind))
    return block


_AXES = {1: ("rows",), 2: ("rows", "columns"), 3: ("experts", "rows", "columns")}

_AxisGrid = tuple[int | None, int]
"""Elements that share a scale value along an axis (None where nothing states it), and how many values there are."""


def _axis_grids(shape: tuple[int, ...], grid: Grid) -> tuple[_AxisGrid, _AxisGrid]:
    """Rows and columns."""
    block = grid.block or (None, None)
    if len(grid.shape) == len(shape):
        return (block[0], grid.shape[-2]), (block[1], grid.shape[-1])
    if grid.shape == shape[:1]:
        return (1, shape[0] if len(shape) == 2 else 1), (None, 1)
    return (None, math.prod(grid.shape)), (None, math.prod(grid.shape))


def _blocks(wanted: Range | None, size: int, axis: _AxisGrid, where: str, kind: str) -> Range | None:
    block, count = axis
    if wanted is None or wanted == (0, size) or count == 1:
        return None
    start, stop = wanted
    if block is None:
        raise SliceError(_unstated(where, kind))
    if start % block or (stop % block and stop != size):
        raise SliceError(
            f"{where}: {kind} {start} to {stop} cut through blocks of {block} {kind} that share a scale. "
            f"Begin and end at multiples of {block}, or at the edge ({size})."
        )
    return start // block, math.ceil(stop / block)


def _unstated(where: str, kind: str) -> str:
    return (
        f"{where}: nothing states how many {kind} share a scale value, so its scale cannot be cut in step with it. "
        "Load the weight whole and cut it after dequantizing."
    )

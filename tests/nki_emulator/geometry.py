"""Pure arithmetic on shapes and element strides."""

from __future__ import annotations

import itertools
import math

Shape = tuple[int, ...]


def contiguous_strides(shape: Shape) -> Shape:
    """Row-major element strides."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def extent(shape: Shape, strides: Shape) -> int:
    """Distance in elements from the first to the last element addressed."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def repeats(shape: Shape, strides: Shape) -> bool:
    """Whether an access pattern may address an element more than once."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def merged(shape: Shape, strides: Shape) -> tuple[Shape, Shape]:
    """The same addresses with as few dimensions as possible: size 1 dropped, neighbours merged where they continue."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return tuple(size for size, _ in dims), tuple(stride for _, stride in dims)


def run_length(shape: Shape, strides: Shape) -> int:
    """Elements of the innermost contiguous run."""
    run = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run


def reshape_strides(shape: Shape, strides: Shape, wanted: Shape) -> Shape | None:
    """Strides that address the same elements as `wanted`; None if the layout does not allow it without copying."""
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    result: list[int] = []
    axis = 0
    while axis < len(wanted) or dims:
        if axis < len(wanted) and wanted[axis] == 1:
            result.append(1)
            axis += 1
            continue
        first, group = axis, 1
        old: list[tuple[int, int]] = []
        old_count = 1
        while not old or old_count != group:
            if not old or old_count < group:
                if not dims:
                    return None
                old.append(dims.pop(0))
                old_count *= old[-1][0]
            else:
                if axis == len(wanted):
                    return None
                group *= wanted[axis]
                axis += 1
        for (_, outer), (size, inner) in itertools.pairwise(old):
            if outer != size * inner:
                return None
        result.extend(s * old[-1][1] for s in contiguous_strides(wanted[first:axis]))
    return tuple(result)


def count(shape: Shape) -> int:
    """Number of elements."""
    return math.prod(shape)

"""How each family turns codes and scales into values, written from the formats' descriptions alone.

A grid says which scale covers which element. Every family here multiplies: value = code x scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
Indices = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]


class Grid(Protocol):
    """Which scale belongs to which element of a weight."""

    def scale_shape(self, shape: Shape) -> Shape:
        """The scale tensor's shape for a weight of this shape."""

    def scale_index(self, shape: Shape) -> Indices:
        """For each element of the weight, the flat position of its scale."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of `rows` x `columns` over the last two dimensions; blocks at the edges are smaller."""

    rows: int
    columns: int

    def scale_shape(self, shape: Shape) -> Shape:
        *batch, n, k = shape
        return (*batch, -(-n // self.rows), -(-k // self.columns))

    def scale_index(self, shape: Shape) -> Indices:
        n, k = shape[-2:]
        grid = np.arange(np.prod(self.scale_shape(shape))).reshape(self.scale_shape(shape))
        return grid[..., np.arange(n)[:, None] // self.rows, np.arange(k) // self.columns]


@dataclass(frozen=True)
class GroupedBlocks:
    """128 x 128 blocks that start anew in each of `groups` equal row ranges.

    So a fused qkv is stored that was quantized by tensor-parallel rank: more scale rows than ceil(n / 128) where a
    range is no multiple of 128.
    """

    groups: int

    def scale_shape(self, shape: Shape) -> Shape:
        n, k = shape
        return self.groups * -(-(n // self.groups) // 128), -(-k // 128)

    def scale_index(self, shape: Shape) -> Indices:
        n, k = shape
        group, row = np.divmod(np.arange(n), n // self.groups)
        scale_rows, scale_columns = self.scale_shape(shape)
        block = group * (scale_rows // self.groups) + row // 128
        return np.asarray(block[:, None] * scale_columns + np.arange(k) // 128)


@dataclass(frozen=True)
class SpreadBlocks:
    """128 x 128 blocks whose scale keeps a dimension of 1 behind each of its two: [rows, 1, columns, 1]."""

    def scale_shape(self, shape: Shape) -> Shape:
        rows, columns = Blocks(128, 128).scale_shape(shape)
        return rows, 1, columns, 1

    def scale_index(self, shape: Shape) -> Indices:
        return Blocks(128, 128).scale_index(shape)


@dataclass(frozen=True)
class WholeTensor:
    """One scale for the whole weight, stored with the given shape: () or (1,)."""

    stored: Shape = ()

    def scale_shape(self, shape: Shape) -> Shape:
        return self.stored

    def scale_index(self, shape: Shape) -> Indices:
        return np.zeros(shape, np.intp)


@dataclass(frozen=True)
class Rows:
    """One scale a row (output channel), stored as [n, 1] or, if `flat`, as [n]."""

    flat: bool = False

    def scale_shape(self, shape: Shape) -> Shape:
        return (shape[0],) if self.flat else (shape[0], 1)

    def scale_index(self, shape: Shape) -> Indices:
        return np.broadcast_to(np.arange(shape[0])[:, None], shape)


@dataclass(frozen=True)
class Experts:
    """One scale an expert of a stacked weight [experts, n, k], stored as [experts, 1, 1]."""

    def scale_shape(self, shape: Shape) -> Shape:
        return shape[0], 1, 1

    def scale_index(self, shape: Shape) -> Indices:
        return np.broadcast_to(np.arange(shape[0])[:, None, None], shape)


@dataclass(frozen=True)
class Rule:
    """A family's dequantization: (decoded codes, decoded scales) -> values.

    `exponents` is for scales stored as U8, whose number is the exponent of a power of two, biased by 127.
    """

    grid: Grid
    exponents: bool = False

    def __call__(self, codes: Values, scale: npt.NDArray[Any]) -> Values:
        scale = np.asarray(scale, np.float64)
        if self.exponents:
            scale = np.exp2(scale - 127)
        return np.asarray(codes * scale.reshape(-1)[self.grid.scale_index(codes.shape)])

"""What the kernels' parts hand to each other while a kernel is traced: shares of the work, groups, and busy engines.

Dimensions of each record are named in the glossary on top of tiles.py.
"""

from dataclasses import dataclass

import nki.language as nl


@dataclass
class Share(nl.NKIObject):
    """What one program of a launch works on: columns or tokens `first` to `end`, `size` of them."""

    first: int
    end: int
    size: int


@dataclass
class ExpertWeights(nl.NKIObject):
    """An expert in HBM: gate and up uint8 [h, k] (fp4: k / 2), down uint8 [n, h] (fp4: h / 2), and e8m0 scales."""

    gate: nl.ndarray
    gate_scale: nl.ndarray
    up: nl.ndarray
    up_scale: nl.ndarray
    down: nl.ndarray
    down_scale: nl.ndarray


@dataclass
class KGroup(nl.NKIObject):
    """k tiles `first` to `end`, `tiles` of them, whose transposes share one PSUM bank.

    Each holds `partitions` partitions: 128, or fewer in a group of one tile that is what k leaves over.
    """

    first: int
    end: int
    tiles: int
    partitions: int


@dataclass
class KSpan(nl.NKIObject):
    """Columns of x from `column` on that are loaded together: `segments` times `width` of them.

    A row of x takes `segments` partitions. Once transposed, a k tile of them has `partitions` partitions.
    """

    column: int
    segments: int
    width: int
    partitions: int


@dataclass
class RowGroup(nl.NKIObject):
    """Rows of w from `first` on that share a result transpose, in `stacks * runs` loads.

    A load is `rows_per_load` consecutive rows: `per_partition` on each of `partitions` partitions.
    """

    first: int
    stacks: int
    runs: int
    per_partition: int
    partitions: int
    rows_per_load: int


@dataclass
class Band(nl.NKIObject):
    """Rows `first` to `first + rows` of a weight in the kernel layout, transposed among themselves."""

    first: int
    rows: int


@dataclass
class BandStack(nl.NKIObject):
    """Consecutive bands of equally many rows whose results share transposes: `count` of them from row `first` on."""

    first: int
    rows: int
    count: int


@dataclass
class RowPart(nl.NKIObject):
    """Rows of a band from `first` on: `runs` tiles of `partitions` rows, each a stationary operand."""

    first: int
    runs: int
    partitions: int


@dataclass
class ColumnSpan(nl.NKIObject):
    """`tiles` k tiles from column `first` on: each holds `columns` consecutive columns on each of `partitions`."""

    first: int
    columns: int
    partitions: int
    tiles: int


@dataclass
class TokenTile(nl.NKIObject):
    """Tokens `first` to `end`, `rows` of them: one a partition."""

    first: int
    end: int
    rows: int


@dataclass
class TokenBatch(nl.NKIObject):
    """`tiles` tiles of `rows` tokens each, from token `first` to `end`, whose small matrices are worked on together."""

    first: int
    end: int
    tiles: int
    rows: int


@dataclass
class KeyBlock(nl.NKIObject):
    """`keys` keys of list `source` that share a tile of gathered rows; `offset` counts keys over all lists."""

    source: int
    offset: int
    keys: int


@dataclass
class KeyLists(nl.NKIObject):
    """The lists of a tile of queries: what empty entries add to scores, and where keys lie."""

    bias: nl.ndarray
    """bf16 [queries, keys]: 0, or EMPTY_SCORE for an empty entry."""
    rows: nl.ndarray
    """int32 [128, blocks, queries]: the row of each key, 0 for an empty entry."""
    masks: nl.ndarray
    """int32 [128, blocks, queries]: all bits set, or none for an empty entry."""


@dataclass
class QueryGroup(nl.NKIObject):
    """`count` queries from `first` on whose heads share the partitions: `slot` partitions a query, `rows` in all."""

    first: int
    count: int
    slot: int
    rows: int


@dataclass
class EngineClock(nl.NKIObject):
    """Work given to VectorE and ScalarE so far, in units of 1 / 4.8 GHz. See engine_balance."""

    vector: int
    scalar: int


def my_share(size: int) -> Share:
    """This program's share of `size` columns or tokens: all of them without a grid, else an equal part.

    Where there are fewer than programs, each takes all of them: programs that write the same values are legal, a
    program that issues no instruction is not.
    """
    if nl.program_ndim() == 0 or size < nl.num_programs(axes=0):
        return Share(0, size, size)
    programs = nl.num_programs(axes=0)
    program = nl.program_id(axis=0)
    first = size * program // programs
    end = size * (program + 1) // programs
    return Share(first, end, end - first)

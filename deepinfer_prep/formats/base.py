"""What every checkpoint family has to say, as data, and the protocol by which it is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from deepinfer_prep.checkpoint import Checkpoint
from deepinfer_prep.container import TensorInfo

Element = Literal["e4m3", "e2m1"]

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight with the scale that multiplies it.

    `block` is how many rows and logical columns one scale value covers; None where neither the format nor
    the config says it, or where they disagree, with the sentence in `block_problem`. `no_kernel_scale` is
    the family's own reason why no kernel takes this weight; empty for a GEMM weight.
    """

    weight: str
    scale: str
    element: Element
    block: tuple[int, int] | None
    block_problem: str = ""
    no_kernel_scale: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family reads a checkpoint."""

    family: str
    weights: tuple[QuantizedWeight, ...]
    activation_scales: tuple[str, ...] = ()
    """Static scales of activations and of the KV cache; never touched by halving."""
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Family(Protocol):
    """One checkpoint family; each lives in a file of its own."""

    name: str

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether config and headers are those of this family."""

    def layout(self, checkpoint: Checkpoint) -> Layout:
        """Pair every quantized weight with its scale, from headers and config alone."""


def sibling(weight: str, suffix: str) -> str:
    """The name beside `x.weight` with another last part: sibling("x.weight", "scale") is "x.scale"."""
    stem = weight.rpartition(".")[0]
    return f"{stem}.{suffix}" if stem else suffix


def matrix_shape(weight: TensorInfo, element: Element) -> tuple[int, int]:
    """Rows and logical columns of a weight's last two axes; an e2m1 byte holds two columns."""
    rows, columns = weight.shape[-2:]
    return rows, columns * 2 if element == "e2m1" else columns


def grid_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """How many scale values a matrix has: one for each block, edge blocks included."""
    return math.ceil(rows / block[0]), math.ceil(columns / block[1])


def fits(weight: TensorInfo, scale: TensorInfo, element: Element, block: tuple[int, int]) -> bool:
    """Whether a scale tensor has exactly the grid that these blocks give, leading axes included."""
    if len(weight.shape) < 2 or len(scale.shape) != len(weight.shape):
        return False
    expected = (*weight.shape[:-2], *grid_shape(*matrix_shape(weight, element), block))
    return scale.shape == expected


def grid_problem(weight: TensorInfo, scale: TensorInfo, element: Element, block: tuple[int, int]) -> str:
    """The sentence for a grid that is not what the stated blocks give."""
    expected = grid_shape(*matrix_shape(weight, element), block)
    return (
        f"blocks of {block[0]}x{block[1]} are stated and give a grid of {list(expected)}, "
        f"but the scale has {list(scale.shape)}"
    )


def config_block(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """`weight_block_size` of the config as rows and columns; None where it is absent or no pair of numbers."""
    size = checkpoint.quantization.get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(type(number) is int and number > 0 for number in size):
        return size[0], size[1]
    return None

"""How many rows and columns one scale value covers: by config or unmistakable shape, never by dividing shapes."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_prep.families.quantization_config import Block
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import Element, grid_shape, matrix_shape


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block of one weight, or None with the sentence that says why it is not known."""

    size: Block | None
    problem: str = ""


def known_blocks(weight: TensorInfo, scale: TensorInfo, stated: Block | None, element: Element = "e4m3") -> Blocks:
    """The block of a weight whose config states at most one block size.

    One value can only cover the tensor, one value a row only its row, and a scale with as many rows as the
    weight has blocks of one row; anything else has to be the grid that the stated size gives.
    """
    plain = per_tensor(weight, scale, element) or per_row(weight, scale, element)
    if plain is not None:
        return plain
    if len(weight.shape) < 2:
        return not_a_matrix(weight)
    if stated is None:
        return Blocks(None, f"nothing states the block size of its scale {list(scale.shape)}")
    for block in (stated, (1, stated[1])):
        if fits(weight, scale, element, block):
            return Blocks(block)
    return Blocks(None, grid_problem(weight, scale, element, stated))


def per_tensor(weight: TensorInfo, scale: TensorInfo, element: Element = "e4m3") -> Blocks | None:
    """The block of a scale that is one value, or one value a matrix of a stack."""
    if len(weight.shape) < 2 or not (scale.elements == 1 or scale.shape == (*weight.shape[:-2], 1, 1)):
        return None
    rows, columns = matrix_shape(weight.shape, element)
    return Blocks((max(1, rows), max(1, columns)))


def per_row(weight: TensorInfo, scale: TensorInfo, element: Element = "e4m3") -> Blocks | None:
    """The block of a scale [..., rows, 1], or [rows] where that cannot mean columns."""
    if len(weight.shape) < 2:
        return None
    rows, columns = matrix_shape(weight.shape, element)
    if scale.shape == (*weight.shape[:-1], 1) or (scale.shape == (rows,) == weight.shape[:-1] and rows != columns):
        return Blocks((1, max(1, columns)))
    return None


def fits(weight: TensorInfo, scale: TensorInfo, element: Element, block: Block) -> bool:
    """Whether a scale tensor has exactly the grid that these blocks give, leading axes included."""
    if len(weight.shape) < 2 or len(scale.shape) != len(weight.shape):
        return False
    return scale.shape == (*weight.shape[:-2], *grid_shape(*matrix_shape(weight.shape, element), block))


def grid_problem(weight: TensorInfo, scale: TensorInfo, element: Element, block: Block) -> str:
    """The sentence for a grid that is not what the stated blocks give."""
    if len(weight.shape) < 2:
        return not_a_matrix(weight).problem
    expected = [*weight.shape[:-2], *grid_shape(*matrix_shape(weight.shape, element), block)]
    return (
        f"blocks of {block[0]}x{block[1]} are stated and give a grid of {expected}, but the scale has "
        f"{list(scale.shape)}"
    )


def not_a_matrix(weight: TensorInfo) -> Blocks:
    """For weights with fewer than two axes."""
    return Blocks(None, f"the weight has the shape {list(weight.shape)}, which is not a matrix")

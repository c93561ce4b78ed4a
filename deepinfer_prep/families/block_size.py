"""How many rows and columns one scale value covers: by config or unmistakable shape, never by dividing shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_prep.families.schemes import Block, Scheme
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import Element, grid_shape, matrix_shape


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block of one weight, or None with the sentence that says why it is not known."""

    size: Block | None
    problem: str = ""


def explain(weight: TensorInfo, scale: TensorInfo, schemes: Sequence[Scheme], element: Element = "e4m3") -> Blocks:
    """The block of a weight from what the configs say: the first statement that its scale's shape bears out.

    Where none is borne out, the block is not known and the first statement is the problem. Without a statement only
    a shape that cannot mean anything else tells the block.
    """
    if len(weight.shape) < 2:
        return not_a_matrix(weight)
    found = [by_scheme(weight, scale, scheme, element) for scheme in schemes or [Scheme()]]
    return next((blocks for blocks in found if blocks.size is not None), found[0])


def by_scheme(weight: TensorInfo, scale: TensorInfo, scheme: Scheme, element: Element = "e4m3") -> Blocks:
    """The block of a matrix by one statement, or None where its scale's shape does not bear it out."""
    columns = matrix_shape(weight.shape, element)[1]
    unlike = Blocks(None, f"{scheme.says}, but the scale has the shape {list(scale.shape)}")
    match scheme.strategy:
        case "unknown":
            return Blocks(None, scheme.says)
        case "tensor":
            return per_tensor(weight, scale, element) or unlike
        case "row":
            is_row = scale.shape in (weight.shape[:-1], (*weight.shape[:-1], 1))
            return Blocks((1, max(1, columns))) if is_row else unlike
        case "block" if scheme.block is not None:
            if fits(weight, scale, element, scheme.block):
                return Blocks(scheme.block)
            return Blocks(None, grid_problem(weight, scale, element, scheme.block))
        case _:
            return known_blocks(weight, scale, scheme.block, element)


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
    """Whether a scale has exactly the grid that these blocks give, leading axes included; more axes have to be 1."""
    if len(weight.shape) < 2:
        return False
    expected = (*weight.shape[:-2], *grid_shape(*matrix_shape(weight.shape, element), block))
    if scale.elements == 1 == math.prod(expected):
        return True
    if len(scale.shape) <= len(weight.shape):
        return scale.shape == expected
    return _squeezed(scale.shape) == _squeezed(expected)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of 1: [n/128, 1, k/128, 1] is the grid [n/128, k/128]."""
    return tuple(size for size in shape if size != 1)


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

"""Forms of instructions that public kernels use: what the GEMM kernels issue is held against them."""

from __future__ import annotations

import pytest
from nki_emulator import Options, TensorSpec, run
from nki_emulator.record import Instruction, Operand

from tests.kernels.cases import GEMMS, ON_SIMULATOR, Gemm

pytestmark = pytest.mark.skipif(ON_SIMULATOR, reason="the simulator keeps no record")

REPEATED_SCALES = "scales.py"
"""Loads a row of 32 x 32 scales for 32 rows of the weight: a DMA for each would be as many as 16 a weight DMA."""


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_both_sides_of_a_dma_have_the_same_shape(gemm: Gemm, m: int, cores: int) -> None:
    record = _instructions(gemm, m, 1536, 1280, cores)  # 1280 columns are whole k tiles of fp8, and not of fp4
    unlike = {i.location.split("/")[-1] for i in record if i.op == "dma_copy" and _unlike(i)}
    assert not {place for place in unlike if not place.startswith(REPEATED_SCALES)}


def test_a_dma_of_unlike_shapes_is_seen() -> None:
    (gemm,) = (gemm for gemm in GEMMS if gemm.name == "fp8_linear_raw")
    assert any(i.op == "dma_copy" and _unlike(i) for i in _instructions(gemm, 3, 1536, 1280, 1))


def _instructions(gemm: Gemm, m: int, n: int, k: int, cores: int) -> tuple[Instruction, ...]:
    rows, columns = gemm.scale_block
    dtype = "uint8" if gemm.scale_bytes else "float32"
    weights = TensorSpec((n, k // gemm.codes_per_byte), "uint8")
    scale = TensorSpec((-(-n // rows), k // columns), dtype)
    arguments = [TensorSpec((m, k), "bfloat16"), weights, scale]
    record = run(gemm.kernel(cores), *arguments, grid=cores, options=Options(arithmetic=False)).instructions
    assert record is not None
    return record


def _unlike(instruction: Instruction) -> bool:
    """Whether the two sides differ in more than dimensions of size 1."""
    ends: list[Operand] = [instruction.operand("dst"), instruction.operand("src")]
    shapes = [tuple(size for size in end.shape if size != 1) for end in ends]
    return shapes[0] != shapes[1]

"""An expert with e4m3 weights in one launch, as the one that all tokens share."""

import nki
import nki.language as nl

from .expert_steps import expert_rows
from .gemm_fp8 import linear_fp8
from .records import ExpertWeights


@nki.jit
def kernel(
    x: nl.ndarray,
    gate: nl.ndarray,
    gate_scale: nl.ndarray,
    up: nl.ndarray,
    up_scale: nl.ndarray,
    down: nl.ndarray,
    down_scale: nl.ndarray,
    weight: nl.ndarray,
) -> nl.ndarray:
    """fp8_linear(swiglu(fp8_linear(x, gate), fp8_linear(x, up)) * weight, down): bf16 [m, n].

    x bf16 [m, k], gate and up uint8 [h, k], down uint8 [n, h], scales uint8 [h / 32, k / 32] and [n / 32, h / 32],
    weight fp32 [m, 1]. k and h are multiples of 128; a grid of 2 takes h and n in multiples of 256.
    """
    expert = ExpertWeights(gate, gate_scale, up, up_scale, down, down_scale)
    return expert_rows(x, expert, weight, linear_fp8)

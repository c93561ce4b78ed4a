"""A routed expert in one launch: two GEMMs, SwiGLU, and the GEMM that takes its result. It spares two calls."""

import nki
import nki.language as nl

from .expert_steps import expert_rows
from .gemm_fp4 import linear_fp4
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
    """fp4_linear(swiglu(fp4_linear(x, gate), fp4_linear(x, up)) * weight, down): bf16 [m, n].

    x bf16 [m, k], gate and up uint8 [h, k / 2], down uint8 [n, h / 2], scales uint8 [h, k / 32] and [n, h / 32], weight
    fp32 [m, 1]. k and h are multiples of 128; a grid of 2 takes h and n in multiples of 256.
    """
    return expert_rows(x, ExpertWeights(gate, gate_scale, up, up_scale, down, down_scale), weight, linear_fp4)

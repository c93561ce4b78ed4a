"""An expert with e4m3 weights in one launch, of weights in the kernel layout."""

import nki
import nki.language as nl

from .expert_steps import expert_rows
from .kmajor_fp8 import linear_fp8_kmajor
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
    """`fp8_expert.kernel` of weights in the kernel layout."""
    expert = ExpertWeights(gate, gate_scale, up, up_scale, down, down_scale)
    return expert_rows(x, expert, weight, linear_fp8_kmajor)

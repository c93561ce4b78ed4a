"""A routed expert in one launch, of weights in the kernel layout, left out where no token was routed to it."""

import nki
import nki.language as nl

from .expert_steps import gated_rows
from .kmajor_fp4 import linear_fp4_kmajor
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
    flag: nl.ndarray,
) -> nl.ndarray:
    """`fp4_expert_gated.kernel` of weights in the kernel layout."""
    expert = ExpertWeights(gate, gate_scale, up, up_scale, down, down_scale)
    return gated_rows(x, expert, weight, flag, linear_fp4_kmajor)

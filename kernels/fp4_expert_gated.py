"""A routed expert in one launch that is left out where no token was routed to it."""

from collections.abc import Callable

import nki
import nki.language as nl

from .fp4_expert import activate_share, inner_rows, wait_for_both
from .gate import fill_zero, trips_if_one
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
    flag: nl.ndarray,
) -> nl.ndarray:
    """`fp4_expert.kernel` where flag int32 [1, 1] is 1; otherwise zeros, and no weight of the expert is read."""
    expert = ExpertWeights(gate, gate_scale, up, up_scale, down, down_scale)
    return gated_rows(x, expert, weight, flag, linear_fp4)


def gated_rows(
    x: nl.ndarray, expert: ExpertWeights, weight: nl.ndarray, flag: nl.ndarray, linear: Callable[..., None]
) -> nl.ndarray:
    """The result, bf16 [m, n] in shared HBM. `linear` is the GEMM of the layout that the weights are in.

    Each step is a loop of its own: a loop keeps the tiles of its body, and the barrier stands outside of all, where
    both cores reach it in any case.
    """
    m = x.shape[0]
    out = nl.ndarray((m, expert.down.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    gated, raised, hidden = inner_rows(m, expert.gate.shape[0])
    fill_zero(out)
    trips = trips_if_one(flag)

    def gate_once(_index: nl.ndarray) -> None:
        linear(gated, x, expert.gate, expert.gate_scale, True)

    def up_once(_index: nl.ndarray) -> None:
        linear(raised, x, expert.up, expert.up_scale, True)

    def activate_once(_index: nl.ndarray) -> None:
        activate_share(hidden, gated, raised, weight)

    def down_once(_index: nl.ndarray) -> None:
        linear(out, hidden, expert.down, expert.down_scale, True)

    nl.fori_loop(0, trips, gate_once)
    nl.fori_loop(0, trips, up_once)
    nl.fori_loop(0, trips, activate_once)
    wait_for_both(hidden)
    nl.fori_loop(0, trips, down_once)
    return out

"""What an expert's kernels share: two GEMMs, SwiGLU, and the GEMM that takes its result, one after another.

Dimensions: m rows of x, k its columns, h the expert's inner width, n the result's columns.
"""

from collections.abc import Callable

import nki.isa as nisa
import nki.language as nl

from .gate import fill_zero, trips_if_one
from .hc_layout import token_tiles
from .records import ExpertWeights, my_share
from .swiglu import activate_weighted


def expert_rows(x: nl.ndarray, expert: ExpertWeights, weight: nl.ndarray, linear: Callable[..., None]) -> nl.ndarray:
    """The expert's result, bf16 [m, n] in shared HBM. `linear` is the GEMM of the layout that the weights are in."""
    m = x.shape[0]
    out = nl.ndarray((m, expert.down.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    gated, raised, hidden = inner_rows(m, expert.gate.shape[0])
    linear(gated, x, expert.gate, expert.gate_scale, True)
    linear(raised, x, expert.up, expert.up_scale, True)
    activate_share(hidden, gated, raised, weight)
    wait_for_both(hidden)
    linear(out, hidden, expert.down, expert.down_scale, True)
    return out


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


def inner_rows(m: int, h: int) -> tuple[nl.ndarray, nl.ndarray, nl.ndarray]:
    """What lies between the GEMMs, bf16 [m, h] in HBM: gate, up, and SwiGLU of both."""
    gated = nl.ndarray((m, h), dtype=nl.bfloat16, buffer=nl.shared_hbm, name="expert_gate")
    raised = nl.ndarray((m, h), dtype=nl.bfloat16, buffer=nl.shared_hbm, name="expert_up")
    hidden = nl.ndarray((m, h), dtype=nl.bfloat16, buffer=nl.shared_hbm, name="expert_hidden")
    return gated, raised, hidden


def activate_share(hidden: nl.ndarray, gated: nl.ndarray, raised: nl.ndarray, weight: nl.ndarray) -> None:
    """SwiGLU of the columns that this program's GEMMs have written: the same share, so there is nothing to wait for."""
    share = my_share(hidden.shape[1])
    mine = nl.ds(share.first, share.size)
    for tile in token_tiles(hidden.shape[0]):
        rows = nl.ds(tile.first, tile.rows)
        activate_weighted(hidden[rows, mine], gated[rows, mine], raised[rows, mine], weight[rows, :])


def wait_for_both(hidden: nl.ndarray) -> None:
    """Until the other core has written its columns, too: the next GEMM sums over all of them."""
    if nl.program_ndim() != 0 and nl.num_programs(axes=0) == 2:
        nisa.core_barrier(hidden, (0, 1))

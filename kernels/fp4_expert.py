"""A routed expert in one launch: two GEMMs, SwiGLU, and the GEMM that takes its result. Two calls of three are spared.

Dimensions: m rows of x, k its columns, h the expert's inner width, n the result's columns.
"""

from collections.abc import Callable

import nki
import nki.isa as nisa
import nki.language as nl

from .gemm_fp4 import linear_fp4
from .hc_layout import token_tiles
from .records import ExpertWeights, my_share
from .swiglu import activate_weighted


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

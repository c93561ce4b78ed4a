"""Running a kernel's work only if a flag says so: a loop with a trip count of 0 or 1, as there is no run-time `if`."""

import nki.isa as nisa
import nki.language as nl

from .records import my_share
from .tile_pool import P

ZERO_COLUMNS = 4096


def fill_zero(out: nl.ndarray) -> None:
    """Zeros in this program's columns of out bf16 [m, n]: memory is not initialised, and the loop may run no trip."""
    m = out.shape[0]
    share = my_share(out.shape[1])
    zeros = nl.ndarray((min(m, P), min(share.size, ZERO_COLUMNS)), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    for row in range(0, m, P):
        rows = min(P, m - row)
        for column in range(share.first, share.end, ZERO_COLUMNS):
            columns = min(ZERO_COLUMNS, share.end - column)
            nisa.dma_copy(dst=out[row : row + rows, column : column + columns], src=zeros[0:rows, 0:columns])


def trips_if_one(flag: nl.ndarray) -> nisa.VirtualRegister:
    """A register that holds 1 if flag (int32 [1, 1] in HBM) is 1, else 0, so that no other value makes more trips."""
    loaded = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=flag)
    nisa.tensor_scalar(dst=loaded, data=loaded, op0=nl.equal, operand0=1)
    register = nisa.register_alloc()
    nisa.register_load(register, loaded)
    return register

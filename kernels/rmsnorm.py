"""RMS norm: rows divided by their root mean square, times a weight for each column."""

import nki
import nki.isa as nisa
import nki.language as nl

from .constants import NORM_EPS
from .records import my_share
from .tile_pool import P


@nki.jit
def kernel(x: nl.ndarray, weight: nl.ndarray) -> nl.ndarray:
    """x bf16 [t, d], weight bf16 [d] -> bf16 [t, d], computed in fp32 and rounded once. A grid of 2 halves the tokens.

    NORM_EPS is added to the mean square, which has to stay a finite fp32 number.
    """
    tokens, columns = x.shape
    out = nl.ndarray((tokens, columns), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_share(tokens)
    factors = nl.ndarray((P, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=factors, src=weight.expand_dim(0).broadcast(0, P))
    for first in range(share.first, share.end, P):
        rows = nl.ds(first, min(P, share.end - first))
        _norm(out[rows, :], x[rows, :], factors)
    return out


def _norm(out: nl.ndarray, x: nl.ndarray, factors: nl.ndarray) -> None:
    """One tile of tokens, one a partition."""
    rows, columns = x.shape
    tile = nl.ndarray((rows, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    y = nl.ndarray((rows, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    # The squares themselves are not needed: y is written over.
    nisa.activation_reduce(dst=y, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=inverse)
    nisa.tensor_scalar(
        dst=inverse, data=inverse, op0=nl.multiply, operand0=1.0 / columns, op1=nl.add, operand1=NORM_EPS
    )
    nisa.tensor_scalar(dst=inverse, data=inverse, op0=nl.rsqrt, operand0=0.0)
    nisa.scalar_tensor_tensor(
        dst=y, data=tile, op0=nl.multiply, operand0=inverse, op1=nl.multiply, operand1=factors[0:rows, :]
    )
    nisa.dma_copy(dst=out, src=y)

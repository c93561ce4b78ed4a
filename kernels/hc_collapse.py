"""Hyper-connection input: the residual streams weighted and summed into one hidden state."""

import nki
import nki.isa as nisa
import nki.language as nl

from .constants import HC
from .hc_layout import load_coefficients, load_streams, row_segments, token_tiles, weighted_sum
from .records import my_share


@nki.jit
def kernel(x: nl.ndarray, mix: nl.ndarray) -> nl.ndarray:
    """x bf16 [t, HC, h], mix fp32 [t, HC] -> bf16 [t, h]: the sum over m of mix[:, m] * x[:, m]. Grid 1 or 2."""
    tokens, streams, columns = x.shape
    assert streams == HC, f"x has {streams} streams, must be {HC}"
    out = nl.ndarray((tokens, columns), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_share(columns)
    mine = nl.ds(share.first, share.size)
    for tile in token_tiles(tokens):
        rows = nl.ds(tile.first, tile.rows)
        _collapse(out[rows, mine], x[rows, :, mine], mix[rows, :])
    return out


def _collapse(out: nl.ndarray, x: nl.ndarray, mix: nl.ndarray) -> None:
    """One tile of tokens."""
    rows, columns = out.shape
    segments = row_segments(columns, rows)
    streams = load_streams(x, segments)
    weights = load_coefficients(mix, segments)
    y = nl.ndarray((rows * segments, columns // segments), dtype=nl.bfloat16, buffer=nl.sbuf)
    terms = []
    factors = []
    for m in range(HC):
        terms.append(streams[:, m, :])
        factors.append(weights[:, m : m + 1])
    weighted_sum(y, terms, factors)
    nisa.dma_copy(dst=out.reshape_dim(1, (segments, columns // segments)), src=y)

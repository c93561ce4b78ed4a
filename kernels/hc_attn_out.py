"""Hyper-connection output: a layer's result added to the mixed residual streams."""

import nki
import nki.isa as nisa
import nki.language as nl

from .constants import HC
from .hc_layout import load_coefficients, load_streams, row_segments, token_tiles, weighted_sum
from .records import my_share


@nki.jit
def kernel(x: nl.ndarray, residual: nl.ndarray, post: nl.ndarray, comb: nl.ndarray) -> nl.ndarray:
    """out[:, j] = post[:, j] * x + sum over i of comb[:, i, j] * residual[:, i], in fp32. Grid 1 or 2.

    x bf16 [t, h], residual bf16 [t, HC, h], post fp32 [t, HC], comb fp32 [t, HC, HC] -> bf16 [t, HC, h].
    """
    tokens, streams, columns = residual.shape
    assert streams == HC, f"residual has {streams} streams, must be {HC}"
    out = nl.ndarray((tokens, HC, columns), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    fresh = x.expand_dim(1)
    mixing = comb.reshape((tokens, HC * HC))
    share = my_share(columns)
    mine = nl.ds(share.first, share.size)
    for tile in token_tiles(tokens):
        rows = nl.ds(tile.first, tile.rows)
        _combine(out[rows, :, mine], fresh[rows, :, mine], residual[rows, :, mine], post[rows, :], mixing[rows, :])
    return out


def _combine(out: nl.ndarray, x: nl.ndarray, residual: nl.ndarray, post: nl.ndarray, comb: nl.ndarray) -> None:
    """One tile of tokens; x [rows, 1, columns], comb [rows, HC * HC]."""
    rows, _, columns = out.shape
    segments = row_segments(columns, rows)
    width = columns // segments
    fresh = load_streams(x, segments)
    streams = load_streams(residual, segments)
    post_weights = load_coefficients(post, segments)
    comb_weights = load_coefficients(comb, segments)
    for j in range(HC):
        terms = [fresh[:, 0, :]]
        factors = [post_weights[:, j : j + 1]]
        for i in range(HC):
            terms.append(streams[:, i, :])
            factors.append(comb_weights[:, i * HC + j : i * HC + j + 1])
        y = nl.ndarray((rows * segments, width), dtype=nl.bfloat16, buffer=nl.sbuf)
        weighted_sum(y, terms, factors)
        nisa.dma_copy(dst=out[:, j, :].reshape_dim(1, (segments, width)), src=y)

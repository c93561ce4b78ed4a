"""The compressor's pool without a rounding to bf16, for a norm that takes fp32."""

import nki
import nki.language as nl

from .compress_pool import pool_groups


@nki.jit
def kernel(score: nl.ndarray, latent: nl.ndarray) -> nl.ndarray:
    """The sum over r of softmax(score) * latent: fp32 [g, r, d] each -> fp32 [g, d]. A grid of 2 halves the columns."""
    out = nl.ndarray((score.shape[0], score.shape[2]), dtype=nl.float32, buffer=nl.shared_hbm)
    pool_groups(out, score, latent)
    return out

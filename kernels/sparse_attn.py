"""Sparse attention over one cache."""

import nki
import nki.language as nl

from .gathered_attention import attend


@nki.jit
def kernel(q: nl.ndarray, kv: nl.ndarray, sink: nl.ndarray, idx: nl.ndarray, scale: float) -> nl.ndarray:
    """q bf16 [t, heads, d], kv bf16 [n, d], sink fp32 [heads], idx int32 [t, k] -> bf16 [t, heads, d].

    Entries of idx below 0 are empty, the others rows of kv below 2^24. Grid 1 or 2: the queries are halved.
    """
    return attend(q, [kv], [idx], sink, scale)

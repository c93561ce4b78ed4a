"""Sparse attention over two caches with one softmax."""

import nki
import nki.language as nl

from .gathered_attention import attend


@nki.jit
def kernel(
    q: nl.ndarray,
    window: nl.ndarray,
    window_idx: nl.ndarray,
    compressed: nl.ndarray,
    compressed_idx: nl.ndarray,
    sink: nl.ndarray,
    scale: float,
) -> nl.ndarray:
    """As sparse_attn, with keys from two caches bf16 [n, d], each with lists int32 [t, k] of its own."""
    return attend(q, [window, compressed], [window_idx, compressed_idx], sink, scale)

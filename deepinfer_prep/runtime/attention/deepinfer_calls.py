"""Attention by the names and arguments that DeepInfer's model code calls, over `sparse_attn`.

Caches are pages of bf16 rows, or of the records that `kernels/cache_records.py` describes. Arguments that concern GPUs
alone (`sched_meta`, `batch_invariant`) are ignored. The second result, a log-sum, is None: model code does not read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer_prep.errors import PrepError
from deepinfer_prep.kernels import cache_records
from deepinfer_prep.runtime.attention.dispatch import sparse_attn, sparse_attn_two_caches

__all__ = ["decode_mla_mqa_sparse", "prefill_attn_varlen_sparse"]


def decode_mla_mqa_sparse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    head_dim_v: int,
    indices_in_kvcache: torch.Tensor,
    sched_meta: Any,
    softmax_scale: float,
    attn_sink: torch.Tensor,
    batch_invariant: bool = False,
    index_length: torch.Tensor | None = None,
    key_cache_extra: torch.Tensor | None = None,
    indices_in_kvcache_extra: torch.Tensor | None = None,
    index_length_extra: torch.Tensor | None = None,
    fused_norm_rope_cast_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, None]:
    """Attention over the window cache and, if given, the compressed cache, with one softmax.

    Args:
        query: bf16 [t, heads, 512].
        key_cache: bf16 [pages, page, 1, 512], or records uint8 [pages, page, 1, 528].
        head_dim_v: 512.
        indices_in_kvcache: int32 [t, k], rows of the pages one after another; -1 is empty.
        sched_meta: ignored.
        softmax_scale: factor of the products of queries and keys.
        attn_sink: fp32 [heads].
        batch_invariant: ignored.
        index_length: int32 [t], how many entries of a list count; all, if None.
        key_cache_extra: bf16 [pages, page, 1, 512], or records uint8 [pages, page, 1, 288].
        indices_in_kvcache_extra: int32 [t, k].
        index_length_extra: int32 [t].
        fused_norm_rope_cast_kwargs: None.

    Returns:
        bf16 [t, heads, 512], and None.

    Raises:
        PrepError: fused operations or other than 512 columns are asked for.
    """
    _require_plain(fused_norm_rope_cast_kwargs, head_dim_v, query)
    window, lists = _readable(key_cache, _cut(indices_in_kvcache, index_length), cache_records.decode_window)
    if key_cache_extra is None or indices_in_kvcache_extra is None:
        return sparse_attn(query, window, attn_sink, lists, softmax_scale), None
    extra = _cut(indices_in_kvcache_extra, index_length_extra)
    compressed, extra = _readable(key_cache_extra, extra, cache_records.decode_compressed)
    return sparse_attn_two_caches(query, window, lists, compressed, extra, attn_sink, softmax_scale), None


def prefill_attn_varlen_sparse(
    query: torch.Tensor,
    kv_a_with_mqa: torch.Tensor,
    index_topk: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor,
    index_length: torch.Tensor | None = None,
    fused_norm_rope_cast_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, None]:
    """Attention over rows of one buffer: history, the step's tokens and compressed entries.

    Args:
        query: bf16 [t, heads, 512].
        kv_a_with_mqa: bf16 [n, 1, 512].
        index_topk: int32 [t, k], rows of it; -1 is empty.
        softmax_scale: factor of the products of queries and keys.
        attn_sink: fp32 [heads].
        index_length: int32 [t], how many entries of a list count; all, if None.
        fused_norm_rope_cast_kwargs: None.

    Returns:
        bf16 [t, heads, 512], and None.

    Raises:
        PrepError: fused operations are asked for.
    """
    _require_plain(fused_norm_rope_cast_kwargs, query.shape[-1], query)
    lists = _cut(index_topk, index_length)
    return sparse_attn(query, kv_a_with_mqa.flatten(0, -2), attn_sink, lists, softmax_scale), None


def _require_plain(fused: dict[str, Any] | None, columns: int, query: torch.Tensor) -> None:
    if fused is not None:
        raise PrepError(
            "Attention was called with fused_norm_rope_cast_kwargs, which no kernel here computes. Pass None, and "
            "apply norm, rotary positions and the inverse rotation outside of the call."
        )
    if columns != query.shape[-1]:
        raise PrepError(
            f"head_dim_v is {columns} and queries have {query.shape[-1]} columns: keys are the values here."
        )


def _cut(idx: torch.Tensor, length: torch.Tensor | None) -> torch.Tensor:
    """Lists whose entries from `length` on are empty."""
    if length is None:
        return idx
    places = torch.arange(idx.shape[-1], device=idx.device)
    return torch.where(places < length.unsqueeze(-1), idx, -1)


def _readable(
    cache: torch.Tensor, idx: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 rows and lists of them. Of records only those that lists name are decoded, one after another."""
    rows = cache.flatten(0, -2)
    if rows.dtype != torch.uint8:
        return rows, idx
    listed = decode(rows[idx.clamp(min=0).flatten().long()])
    places = torch.arange(idx.numel(), device=idx.device, dtype=idx.dtype).reshape(idx.shape)
    return listed, torch.where(idx < 0, -1, places)

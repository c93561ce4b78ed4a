"""Sparse attention: each query over its own list of keys, which are their own values.

`DEEPINFER_NEURON_NKI_ATTN=0` turns the kernels off.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from deepinfer_prep.kernels import attention_reference, constants
from deepinfer_prep.runtime import kernel_launch, neuron

__all__ = [
    "sparse_attn",
    "sparse_attn_supported",
    "sparse_attn_two_caches",
    "sparse_attn_two_caches_supported",
    "window_attn",
    "window_attn_supported",
]

_COLUMNS = 128
_WIDEST = 512
_ROWS_MAX = 1 << 24
"""Rows of a cache: row numbers pass through fp32."""
_PADDING = 32


def sparse_attn_supported(q: torch.Tensor, kv: torch.Tensor, idx: torch.Tensor) -> bool:
    """Whether the kernel computes it, by the arguments of `sparse_attn`.

    bf16 on a Neuron device, at most 64 heads, d a multiple of 128 up to 512, at most 1024 entries a list and 2^24
    rows, kernels not turned off.
    """
    return _supported(q, [kv], [idx])


def sparse_attn_two_caches_supported(
    q: torch.Tensor,
    window: torch.Tensor,
    window_idx: torch.Tensor,
    compressed: torch.Tensor,
    compressed_idx: torch.Tensor,
) -> bool:
    """Whether the kernel computes it, by the arguments of `sparse_attn_two_caches`; as `sparse_attn_supported`."""
    return _supported(q, [window, compressed], [window_idx, compressed_idx])


def sparse_attn(q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor, idx: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of each query over its own list of keys.

    Args:
        q: bf16 [..., heads, d], roped.
        kv: bf16 [n, d], one cache for all queries; or [b, n, d] beside q [b, ..., heads, d], one for each sequence.
        sink: fp32 [heads], a logit of each head that takes a share and gives no value; may be infinite.
        idx: integers [..., k], rows of the query's cache; entries below 0 or from n on are empty, wherever they stand.
        scale: positive factor of the products of queries and keys.

    Returns:
        bf16 [..., heads, d]; zeros for a query without keys. What an empty entry's memory holds has no influence.
    """
    if sparse_attn_supported(q, kv, idx):
        rows, entries, sinks = _rows(kv), _lists(kv, idx), sink.float().contiguous()
        launch = kernel_launch.kernel("sparse_attn")
        return _in_turns(q, lambda queries, turn: launch(queries, rows, sinks, entries[turn], scale))
    found = attention_reference.sparse_attn(q.flatten(0, -3), _rows(kv), sink, _lists(kv, idx), scale)
    return found.reshape(q.shape)  # type: ignore[no-any-return]


def sparse_attn_two_caches(
    q: torch.Tensor,
    window: torch.Tensor,
    window_idx: torch.Tensor,
    compressed: torch.Tensor,
    compressed_idx: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `sparse_attn`, with one softmax over keys from two caches, each with lists of its own.

    Args:
        q: bf16 [..., heads, d].
        window: bf16 [n1, d] or [b, n1, d].
        window_idx: integers [..., k1], rows of window.
        compressed: bf16 [n2, d] or [b, n2, d].
        compressed_idx: integers [..., k2], rows of compressed.
        sink: fp32 [heads].
        scale: positive factor of the products of queries and keys.

    Returns:
        bf16 [..., heads, d].
    """
    first, first_lists = _rows(window), _lists(window, window_idx)
    second, second_lists = _rows(compressed), _lists(compressed, compressed_idx)
    if sparse_attn_two_caches_supported(q, window, window_idx, compressed, compressed_idx):
        launch, sinks = kernel_launch.kernel("sparse_attn_two_caches"), sink.float().contiguous()
        return _in_turns(
            q,
            lambda queries, turn: launch(queries, first, first_lists[turn], second, second_lists[turn], sinks, scale),
        )
    queries = q.flatten(0, -3)
    found = attention_reference.sparse_attn_two_caches(queries, first, first_lists, second, second_lists, sink, scale)
    return found.reshape(q.shape)  # type: ignore[no-any-return]


def window_attn_supported(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Whether the kernel computes it, by the arguments of `window_attn`.

    bf16 on a Neuron device, an even number of heads, d a multiple of 128 up to 512, kernels not turned off.
    """
    return q.shape[-2] % 2 == 0 and _fits(q, [kv])


def window_attn(
    q: torch.Tensor, kv: torch.Tensor, present: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of consecutive tokens of one sequence over their windows of 128: prefill without lists or gathers.

    Args:
        q: bf16 [t, heads, d], roped.
        kv: bf16 [128 + t, d], the 128 tokens before the first query, then the queries' own.
        present: integers [128 + t], below 0 for rows that hold no token: those before the sequence's first.
        sink: fp32 [heads].
        scale: positive factor of the products of queries and keys.

    Returns:
        bf16 [t, heads, d].
    """
    tokens = q.shape[0]
    if not window_attn_supported(q, kv):
        seen = torch.arange(tokens, device=q.device).unsqueeze(-1) + 1
        seen = seen + torch.arange(constants.WINDOW, device=q.device)
        return sparse_attn(q, kv, sink, torch.where(present[seen] < 0, -1, seen), scale)
    padding = -tokens % constants.WINDOW_TILE
    queries = functional.pad(q, (0, 0, 0, 0, 0, padding))
    rows, there = functional.pad(kv, (0, 0, 0, padding)), functional.pad(present.int(), (0, padding), value=-1)
    launch, sinks, parts = kernel_launch.kernel("window_attn"), sink.float().contiguous(), []
    for start in range(0, tokens + padding, constants.M_MAX):
        end = min(start + constants.M_MAX, tokens + padding)
        keys = slice(start, end + constants.WINDOW)
        turn = queries[start:end].contiguous(), rows[keys].contiguous(), there[keys].contiguous()
        parts.append(launch(*turn, sinks, scale))
    return torch.cat(parts)[:tokens]


def _supported(q: torch.Tensor, caches: list[torch.Tensor], lists: list[torch.Tensor]) -> bool:
    fits = q.shape[-2] <= constants.ATTENTION_HEADS_MAX
    fits = fits and all(cache.shape[:-1].numel() <= _ROWS_MAX for cache in caches)
    entries = sum(-(-idx.shape[-1] // _PADDING) * _PADDING for idx in lists)
    return fits and entries <= constants.ATTENTION_KEYS_MAX and _fits(q, caches)


def _fits(q: torch.Tensor, caches: list[torch.Tensor]) -> bool:
    """What all kernels ask of queries and keys."""
    fits = q.dtype == torch.bfloat16 and q.numel() > 0 and all(cache.dtype == q.dtype for cache in caches)
    fits = fits and q.shape[-1] <= _WIDEST and q.shape[-1] % _COLUMNS == 0
    return fits and neuron.holds(q) and kernel_launch.attention_kernels()


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """The rows of all sequences' caches below one another."""
    return cache.flatten(0, -2).contiguous()


def _lists(cache: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """Lists int32 [t, k] of rows of `_rows(cache)`; what lies outside of a query's own cache becomes -1."""
    rows = cache.shape[-2]
    places = idx
    if cache.dim() == 3:
        starts = torch.arange(cache.shape[0], device=idx.device, dtype=idx.dtype) * rows
        places = idx + starts.reshape(-1, *[1] * (idx.dim() - 1))
    return torch.where((idx >= 0) & (idx < rows), places, -1).int().flatten(0, -2)


def _in_turns(q: torch.Tensor, launch: Callable[[torch.Tensor, slice], torch.Tensor]) -> torch.Tensor:
    """Launch for as many queries at a time as one program takes."""
    queries = q.flatten(0, -3).contiguous()
    turns = [slice(start, start + constants.M_MAX) for start in range(0, queries.shape[0], constants.M_MAX)]
    return torch.cat([launch(queries[turn], turn) for turn in turns]).reshape(q.shape)

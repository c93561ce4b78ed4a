"""Attention of DeepSeek-V4.1: kernels on a Neuron device, the same in torch elsewhere.

`dispatch` computes attention, `lists` says which rows of a cache a query attends to and where new ones go, `pooling`
turns groups of tokens into compressed entries, `deepinfer_calls` has the names that existing model code calls.

Caches are bf16 [rows, d] of values that went through their record's quantization and back. The last row of a cache
is no entry: it takes what is not stored.
"""

from deepinfer_prep.runtime.attention.deepinfer_calls import decode_mla_mqa_sparse, prefill_attn_varlen_sparse
from deepinfer_prep.runtime.attention.dispatch import (
    sparse_attn,
    sparse_attn_supported,
    sparse_attn_two_caches,
    sparse_attn_two_caches_supported,
    window_attn,
    window_attn_supported,
)
from deepinfer_prep.runtime.attention.lists import (
    draft_lists,
    entry_rows,
    history_rows,
    prefill_window_lists,
    store_rows,
    stored_entries,
    visible_entries,
    window_lists,
    window_rows,
)
from deepinfer_prep.runtime.attention.pooling import (
    compress_and_update_state_decode,
    compress_and_update_state_prefill,
)

__all__ = [
    "compress_and_update_state_decode",
    "compress_and_update_state_prefill",
    "decode_mla_mqa_sparse",
    "draft_lists",
    "entry_rows",
    "history_rows",
    "prefill_attn_varlen_sparse",
    "prefill_window_lists",
    "sparse_attn",
    "sparse_attn_supported",
    "sparse_attn_two_caches",
    "sparse_attn_two_caches_supported",
    "store_rows",
    "stored_entries",
    "visible_entries",
    "window_attn",
    "window_attn_supported",
    "window_lists",
    "window_rows",
]

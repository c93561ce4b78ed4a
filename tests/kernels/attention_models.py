"""The attention kernels on DeepSeek-V4.1's shapes through the cost model.

The floor is the time to read queries, lists and the rows that each query lists, and to write the result; for the dense
window, which reads a row once for all queries, to read all rows once.
"""

from __future__ import annotations

from nki_emulator import TensorSpec, installed

from tests.kernels.models import Modelled, kernel_model

with installed():
    from deepinfer_prep.kernels import sparse_attn, sparse_attn_two_caches, window_attn

HEADS, COLUMNS = 64, 512
WINDOW, TOP_K = 128, 512
ROWS = (1, 4, 16, 64, 128)
SCALE = COLUMNS**-0.5
_SINK = TensorSpec((HEADS,), "float32")


def window_list_model(tokens: int, rows: int = 65536, cores: int = 2) -> Modelled:
    """A layer without compression, its window by lists: decode."""
    arguments = [_queries(tokens), _cache(rows), _SINK, TensorSpec((tokens, WINDOW), "int32"), SCALE]
    return kernel_model(sparse_attn.kernel, arguments, _bytes(tokens, WINDOW), cores)


def compressed_model(tokens: int, rows: int = 65536, cores: int = 2) -> Modelled:
    """A layer with compression: the window and 512 of `rows` entries."""
    window, chosen = TensorSpec((tokens, WINDOW), "int32"), TensorSpec((tokens, TOP_K), "int32")
    arguments = [_queries(tokens), _cache(65536), window, _cache(rows), chosen, _SINK, SCALE]
    return kernel_model(sparse_attn_two_caches.kernel, arguments, _bytes(tokens, WINDOW + TOP_K), cores)


def dense_window_model(tokens: int, cores: int = 2) -> Modelled:
    """A layer without compression in prefill: consecutive tokens, in whole tiles of 64."""
    present = TensorSpec((WINDOW + tokens,), "int32")
    arguments = [_queries(tokens), _cache(WINDOW + tokens), present, _SINK, SCALE]
    size = 4 * tokens * HEADS * COLUMNS + 2 * (WINDOW + tokens) * COLUMNS
    return kernel_model(window_attn.kernel, arguments, size, cores)


def _queries(tokens: int) -> TensorSpec:
    return TensorSpec((tokens, HEADS, COLUMNS), "bfloat16")


def _cache(rows: int) -> TensorSpec:
    return TensorSpec((rows, COLUMNS), "bfloat16")


def _bytes(tokens: int, keys: int) -> int:
    return tokens * (4 * HEADS * COLUMNS + 2 * keys * COLUMNS + 4 * keys)

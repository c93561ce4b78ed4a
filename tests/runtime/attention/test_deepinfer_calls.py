"""Attention by the names that model code calls, over bf16 caches and over records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_prep.errors import PrepError
from deepinfer_prep.kernels import cache_records
from deepinfer_prep.runtime import attention

GENERATOR = torch.Generator().manual_seed(0)
SCALE = 512**-0.5


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).bfloat16()


def lists(t: int, k: int, rows: int) -> torch.Tensor:
    return torch.randint(-2, rows, (t, k), generator=GENERATOR).int()


QUERY, SINK = random(3, 8, 512), random(8).float()
WINDOW, EXTRA = (
    cache_records.encode_window(random(4, 16, 1, 512)),
    cache_records.encode_compressed(random(5, 8, 1, 512)),
)
WINDOW_IDX, EXTRA_IDX = lists(3, 7, 64), lists(3, 11, 40)


def decode(window: torch.Tensor, extra: torch.Tensor | None, **others: Any) -> torch.Tensor:
    out, log_sum = attention.decode_mla_mqa_sparse(
        QUERY, window, 512, WINDOW_IDX, None, SCALE, SINK, False, key_cache_extra=extra,
        indices_in_kvcache_extra=None if extra is None else EXTRA_IDX, **others,
    )  # fmt: skip
    assert log_sum is None
    return out


def test_records_give_what_their_bf16_values_give() -> None:
    window, extra = cache_records.decode_window(WINDOW), cache_records.decode_compressed(EXTRA)
    assert torch.equal(decode(WINDOW, EXTRA), decode(window, extra))
    assert torch.equal(decode(WINDOW, None), decode(window, None))
    expected = attention.sparse_attn_two_caches(
        QUERY, window.view(-1, 512), WINDOW_IDX, extra.view(-1, 512), EXTRA_IDX, SINK, SCALE
    )
    assert torch.equal(decode(WINDOW, EXTRA), expected)


def test_lengths_cut_lists() -> None:
    window, extra = cache_records.decode_window(WINDOW), cache_records.decode_compressed(EXTRA)
    lengths = torch.tensor([0, 3, 7], dtype=torch.int32)
    found = decode(window, extra, index_length=lengths, index_length_extra=lengths + 1)
    kept = [
        torch.where(torch.arange(i.shape[1]) < n[:, None], i, -1)
        for i, n in ((WINDOW_IDX, lengths), (EXTRA_IDX, lengths + 1))
    ]
    expected = attention.sparse_attn_two_caches(
        QUERY, window.view(-1, 512), kept[0], extra.view(-1, 512), kept[1], SINK, SCALE
    )
    assert torch.equal(found, expected)


def test_prefill_reads_one_buffer() -> None:
    rows, idx = random(50, 1, 512), lists(3, 9, 50)
    out, log_sum = attention.prefill_attn_varlen_sparse(QUERY, rows, idx, SCALE, SINK)
    assert log_sum is None
    assert torch.equal(out, attention.sparse_attn(QUERY, rows[:, 0], SINK, idx, SCALE))


def test_what_is_not_computed_is_refused() -> None:
    with pytest.raises(PrepError, match="fused_norm_rope_cast_kwargs"):
        decode(WINDOW, None, fused_norm_rope_cast_kwargs={"eps": 1e-20})
    with pytest.raises(PrepError, match="head_dim_v is 256"):
        attention.decode_mla_mqa_sparse(QUERY, WINDOW, 256, WINDOW_IDX, None, SCALE, SINK)

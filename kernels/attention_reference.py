"""Torch references for attention over lists of keys, index scores and the pool of a compressor (DeepSeek-V4.1).

Functions named after a kernel take its arguments and round once to the type of their input. The `*_values` functions
take the dtype to compute in and return it: float32 as the kernels do, float64 as an oracle.
"""

import torch
from torch import Tensor

from .constants import CANDIDATE_BLOCK, HIGHEST_MAXIMUM, LOWEST_MAXIMUM


def attention_values(q: Tensor, kv: Tensor, sink: Tensor, idx: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """`sparse_attn` computed in `dtype` without a rounding of its result: [t, heads, d]."""
    rows, valid = _gathered(kv, idx, dtype)
    return _attention_over(q.to(dtype), rows, valid, sink.to(dtype), scale)


def _gathered(kv: Tensor, idx: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows that lists name, [t, k, d], zeros where an entry is empty; and which are not, [t, k]."""
    valid = (idx >= 0) & (idx < kv.shape[0])
    rows = kv[torch.where(valid, idx, 0).long()].to(dtype)
    return torch.where(valid.unsqueeze(-1), rows, 0.0), valid


def _attention_over(q: Tensor, rows: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("thd,tkd->thk", q, rows) * scale
    scores = torch.where(valid.unsqueeze(-2), scores, -torch.inf)
    sinks = sink.unsqueeze(-1)
    maximum = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks).clamp(LOWEST_MAXIMUM, HIGHEST_MAXIMUM)
    shares = torch.exp(scores - maximum)
    total = shares.sum(dim=-1, keepdim=True) + torch.exp(sinks - maximum)
    mixed = torch.einsum("thk,tkd->thd", shares, rows)
    return mixed / torch.where(total == 0, 1.0, total)


def sparse_attn(q: Tensor, kv: Tensor, sink: Tensor, idx: Tensor, scale: float) -> Tensor:
    """Attention of each query over its own list of keys, which are their own values.

    Args:
        q: bf16 [t, heads, d].
        kv: bf16 [n, d].
        sink: fp32 [heads], a logit of each head that takes a share and gives no value; may be infinite.
        idx: int32 [t, k], rows of kv. Entries below 0 or from n on are empty, wherever they stand.
        scale: factor of the products of queries and keys.

    Returns:
        bf16 [t, heads, d]; zeros for a query without keys. What an empty entry's memory holds has no influence.
    """
    return attention_values(q, kv, sink, idx, scale, torch.float32).to(q.dtype)


def sparse_attn_two_caches(
    q: Tensor,
    window: Tensor,
    window_idx: Tensor,
    compressed: Tensor,
    compressed_idx: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """As `sparse_attn`, with one softmax over keys from two caches, each with lists of its own."""
    parts = [_gathered(window, window_idx, torch.float32), _gathered(compressed, compressed_idx, torch.float32)]
    rows, valid = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
    return _attention_over(q.float(), rows, valid, sink.float(), scale).to(q.dtype)


def index_score_values(q: Tensor, keys: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores before masking: q [t, heads, d], keys [sequences, d, n] or [d, n], weights [t, heads] -> [t, n]."""
    sequences = keys.shape[0] if keys.dim() == 3 else 1
    of_sequence = q.reshape(sequences, -1, *q.shape[1:]).to(dtype)
    wide = keys.reshape(sequences, *keys.shape[-2:]).to(dtype)
    dots = torch.relu(torch.einsum("sthd,sdn->sthn", of_sequence, wide)).flatten(0, 1)
    return torch.einsum("thn,th->tn", dots, weights.to(dtype))


def index_score(q: Tensor, keys: Tensor, weights: Tensor, klen: Tensor) -> Tensor:
    """How well each entry of the index suits each query: sum over heads of weight * relu(q . key).

    Args:
        q: bf16 [t, heads, d].
        keys: bf16 [d, n], one column an entry; or [sequences, d, n], each sequence's for its equally many queries,
            which are consecutive.
        weights: fp32 [t, heads], factors of the heads; may be negative.
        klen: int32 [t], how many entries, from the first on, a query may see.

    Returns:
        fp32 [t, n], -inf from klen on whatever the keys hold there.
    """
    return masked(index_score_values(q, keys, weights, torch.float32), klen)


def index_candidates(q: Tensor, rows: Tensor, weights: Tensor, klen: Tensor, blocks: Tensor) -> Tensor:
    """`index_score` for the entries of each query's blocks alone, in the order of its list.

    Args:
        q: bf16 [t, heads, d].
        rows: bf16 [sequences, n, d] or [n, d], a row an entry, n a multiple of CANDIDATE_BLOCK.
        weights: fp32 [t, heads].
        klen: int32 [t].
        blocks: int32 [t, count]: b stands for the entries from CANDIDATE_BLOCK * b on; below 0 for none.

    Returns:
        fp32 [t, CANDIDATE_BLOCK, count], -inf for empty places and from klen on.
    """
    sequences = rows.shape[0] if rows.dim() == 3 else 1
    members = torch.arange(CANDIDATE_BLOCK, device=q.device)
    entries = blocks.clamp(min=0).long().unsqueeze(1) * CANDIDATE_BLOCK + members.unsqueeze(-1)
    of_query = torch.arange(q.shape[0], device=q.device) * sequences // q.shape[0]
    keys = rows.reshape(sequences, -1, rows.shape[-1])[of_query[:, None, None], entries]
    dots = torch.relu(torch.einsum("thd,tmbd->thmb", q.float(), keys.float()))
    scores = torch.einsum("thmb,th->tmb", dots, weights.float())
    visible = (blocks >= 0).unsqueeze(1) & (entries < klen[:, None, None])
    return torch.where(visible, scores, -torch.inf)


def masked(scores: Tensor, klen: Tensor) -> Tensor:
    """scores [t, n] with -inf from klen int32 [t] on."""
    visible = torch.arange(scores.shape[-1], device=scores.device) < klen.unsqueeze(-1)
    return torch.where(visible, scores, -torch.inf)


def top_k(scores: Tensor, klen: Tensor, k: int) -> Tensor:
    """The best min(k, klen) entries of scores [t, n] before klen int32 [t]: int32 [t, k], ascending, then -1.

    Which of equal scores win is not defined. An entry that scores -inf is never chosen.
    """
    return _ascending(masked(scores, klen), k)


def candidate_blocks(scores: Tensor, klen: Tensor, count: int, size: int = CANDIDATE_BLOCK) -> Tensor:
    """The `count` blocks of `size` entries with the highest single scores: int32 [t, count], ascending, then -1.

    scores [t, n], klen int32 [t]. A query's last block, which may be partial, is always among them.
    """
    padded = torch.nn.functional.pad(masked(scores, klen), (0, -scores.shape[-1] % size), value=-torch.inf)
    best = padded.reshape(padded.shape[0], -1, size).amax(dim=-1)
    last = (klen.unsqueeze(-1) - 1).div(size, rounding_mode="floor")
    is_last = torch.arange(best.shape[-1], device=scores.device) == last
    return _ascending(torch.where(is_last, torch.inf, best), count)


def within_candidates(scores: Tensor, blocks: Tensor, size: int = CANDIDATE_BLOCK) -> Tensor:
    """scores [t, n] with -inf outside of the blocks int32 [t, count] of `size` entries that candidate_blocks chose."""
    total = -(-scores.shape[-1] // size)
    chosen = torch.zeros(scores.shape[0], total + 1, dtype=torch.int32, device=scores.device)
    chosen = chosen.scatter(1, torch.where(blocks < 0, total, blocks).long(), 1)[:, :total]
    allowed = chosen.unsqueeze(-1).expand(-1, -1, size).flatten(1)[:, : scores.shape[-1]]
    return torch.where(allowed == 1, scores, -torch.inf)


def _ascending(scores: Tensor, k: int) -> Tensor:
    """Columns of the k highest scores above -inf, ascending, then -1: int32 [t, k]."""
    n = scores.shape[-1]
    best = torch.topk(scores, min(k, n), dim=-1)
    places = torch.where(best.values == -torch.inf, n, best.indices).sort(dim=-1).values
    places = torch.where(places == n, -1, places).int()
    return torch.nn.functional.pad(places, (0, k - places.shape[-1]), value=-1)


def pool_values(score: Tensor, latent: Tensor, dtype: torch.dtype) -> Tensor:
    """`compress_pool` computed in `dtype` without a rounding of its result: [g, d]."""
    shares = torch.softmax(score.to(dtype), dim=-2)
    return (shares * latent.to(dtype)).sum(dim=-2)


def compress_pool(score: Tensor, latent: Tensor) -> Tensor:
    """Each group's tokens blended into one latent, channel by channel, by the softmax of their scores.

    score and latent fp32 [g, r, d] for groups of r tokens -> bf16 [g, d].
    """
    return pool_values(score, latent, torch.float32).to(torch.bfloat16)

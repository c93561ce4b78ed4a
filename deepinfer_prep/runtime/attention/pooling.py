"""The compressor's state: tokens wait in a ring until their group is complete, then become one entry.

`state_cache` is fp32 [slots, size, 2, d]: the token at position p of the sequence in a slot lies in row p % size, its
score first and its latent second. Groups are pooled by `runtime.pool`.
"""

from __future__ import annotations

import torch

from deepinfer_prep.errors import PrepError
from deepinfer_prep.runtime.pool import compress_pool

__all__ = ["compress_and_update_state_decode", "compress_and_update_state_prefill"]


def compress_and_update_state_decode(
    score: torch.Tensor,
    latent: torch.Tensor,
    state_cache: torch.Tensor,
    state_block_idx: torch.Tensor,
    context_lens: torch.Tensor,
    max_seqlen_q: int,
    ratio: int,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Store all tokens of a decode step, then pool the groups that they complete.

    Several tokens of a sequence may come in a step; those that are rejected later are overwritten later.

    Args:
        score: fp32 [t, d].
        latent: fp32 [t, d].
        state_cache: fp32 [slots, size, 2, d], written in place; size is at least ratio + max_seqlen_q - 1.
        state_block_idx: integers [t], the slot of each token's sequence.
        context_lens: integers [t], each token's position and one.
        max_seqlen_q: the most tokens that a sequence has in a step.
        ratio: tokens of a group.
        dtype: bf16 or fp32; what the pool is rounded to.

    Returns:
        `dtype` [t, d]; zeros for a token that completes no group.

    Raises:
        PrepError: the ring is too small.
    """
    size = state_cache.shape[1]
    if size < ratio + max_seqlen_q - 1:
        raise PrepError(
            f"The compressor's state has {size} rows a sequence; groups of {ratio} tokens and steps of up to "
            f"{max_seqlen_q} need {ratio + max_seqlen_q - 1}. Allocate a larger state_cache."
        )
    slots, positions = state_block_idx.long(), context_lens.long() - 1
    state_cache.index_put_((slots, positions % size), torch.stack([score, latent], dim=1).to(state_cache.dtype))
    members = positions.unsqueeze(-1) - ratio + 1 + torch.arange(ratio, device=positions.device)
    kept = state_cache[slots.unsqueeze(-1), members % size]
    return _complete(kept, context_lens % ratio == 0, dtype)


def compress_and_update_state_prefill(
    score: torch.Tensor,
    latent: torch.Tensor,
    state_cache: torch.Tensor,
    state_block_idx: torch.Tensor,
    compressed_batch_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    cu_compressed_seqlens_q: torch.Tensor,
    ratio: int,
    mirror_cp_reverse_index: None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Pool the groups that a prefill step completes, then keep its last tokens.

    A step may begin and end inside a group.

    Args:
        score: fp32 [t, d], the tokens of all sequences one after another.
        latent: fp32 [t, d].
        state_cache: fp32 [slots, size, 2, d], written in place.
        state_block_idx: integers [sequences], the slot of each.
        compressed_batch_mapping: integers [c], the sequence of each row of the result.
        cu_seqlens_q: integers [sequences + 1], where each sequence's tokens begin.
        cu_seqlens_k: integers [sequences + 1], the same of all tokens up to the end of the step.
        cu_compressed_seqlens_q: integers [sequences + 1], where each sequence's rows of the result begin.
        ratio: tokens of a group.
        mirror_cp_reverse_index: None; tokens that are split over ranks (context parallelism) are not put in order.
        dtype: bf16 or fp32; what the pool is rounded to.

    Returns:
        `dtype` [c, d]; zeros for a row without a complete group.

    Raises:
        PrepError: an order of tokens is given.
    """
    if mirror_cp_reverse_index is not None:
        raise PrepError(
            "compress_and_update_state_prefill was given mirror_cp_reverse_index. Put score and latent in the order of "
            "positions before, and pass None."
        )
    fresh = torch.stack([score, latent], dim=1).to(state_cache.dtype)
    ends = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    starts = ends - (cu_seqlens_q[1:] - cu_seqlens_q[:-1])
    old = state_cache[state_block_idx.long()]
    of_row = compressed_batch_mapping.long()
    row = torch.arange(of_row.shape[0], device=of_row.device) - cu_compressed_seqlens_q[of_row]
    group = starts[of_row] // ratio + row
    members = group.unsqueeze(-1) * ratio + torch.arange(ratio, device=of_row.device)
    kept = _tokens(fresh, old, of_row.unsqueeze(-1), members, starts, cu_seqlens_q)
    pooled = _complete(kept, (group + 1) * ratio <= ends[of_row], dtype)
    state_cache.index_put_((state_block_idx.long(),), _newest(fresh, old, starts, ends, cu_seqlens_q))
    return pooled


def _tokens(
    fresh: torch.Tensor,
    old: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    first_tokens: torch.Tensor,
) -> torch.Tensor:
    """What is kept of the tokens at these positions, from the step [t, 2, d] or the rings [sequences, size, 2, d]."""
    local = positions - starts[sequences]
    place = (first_tokens[sequences] + local).clamp(0, fresh.shape[0] - 1)
    before = old[sequences, (positions % old.shape[1]).long()]
    return torch.where((local < 0)[..., None, None], before, fresh[place.long()])


def _newest(
    fresh: torch.Tensor, old: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, first_tokens: torch.Tensor
) -> torch.Tensor:
    """The rings after the step: in each row the newest token that belongs there."""
    count, size = old.shape[:2]
    last = ends.unsqueeze(-1) - 1
    positions = last - (last - torch.arange(size, device=old.device)) % size
    sequences = torch.arange(count, device=old.device).unsqueeze(-1)
    return _tokens(fresh, old, sequences, positions, starts, first_tokens)


def _complete(members: torch.Tensor, complete: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The pool of groups [c, ratio, 2, d], zeros where a group is not complete."""
    pooled = compress_pool(members[:, :, 0], members[:, :, 1], dtype)
    return torch.where(complete.unsqueeze(-1), pooled, torch.zeros_like(pooled))

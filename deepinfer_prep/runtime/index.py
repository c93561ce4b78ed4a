"""Index scores and the choice of what a query attends to: a kernel on a Neuron device, the same in torch elsewhere.

The index's keys are kept as bf16 [sequences, 128, n], a column an entry: TensorE takes them as they lie, without
unpacking or transposing. Where candidates are scored, they are kept as rows, too: bf16 [sequences, n, 128].
`DEEPINFER_NEURON_NKI_ATTN=0` turns the kernels off. Lists are chosen in torch everywhere.
"""

from __future__ import annotations

import torch

from deepinfer_prep.kernels import attention_reference as reference
from deepinfer_prep.kernels.constants import CANDIDATE_BLOCK
from deepinfer_prep.runtime import kernel_launch, neuron

__all__ = [
    "candidate_blocks",
    "candidate_scores",
    "candidate_scores_supported",
    "index_score",
    "index_score_supported",
    "store_keys",
    "top_k_candidates",
    "top_k_positions",
    "within_candidates",
]

_HEAD_DIM = 128
"""Elements of a query's head and of a key: they lie on the partitions."""

_HEADS = (32, 64)

_ENTRIES_MAX = 1 << 24
"""Entries whose numbers pass through fp32 exactly."""

_BLOCK_SHIFT = 3
"""Compilers divide integers in fp32: an entry's block is its number shifted by this."""


def store_keys(cache: torch.Tensor, keys: torch.Tensor, sequences: torch.Tensor, entries: torch.Tensor) -> None:
    """Write keys into the cache of an index, in place.

    Args:
        cache: bf16 [sequences, 128, n]. The last column is no entry: it takes what is not stored.
        keys: bf16 [m, 128].
        sequences: integers [m], which sequence each key belongs to.
        entries: integers [m], its place there; below 0 for a key that is not stored.
    """
    columns = torch.where(entries < 0, cache.shape[-1] - 1, entries)
    cache.transpose(1, 2).index_put_((sequences.long(), columns.long()), keys.to(cache.dtype))


def index_score_supported(q: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the kernel scores: bf16 on a Neuron device, 32 or 64 heads of 128, kernels not turned off."""
    fits = q.dtype == keys.dtype == torch.bfloat16 and q.numel() > 0
    fits = fits and q.shape[-2] in _HEADS and q.shape[-1] == keys.shape[-2] == _HEAD_DIM
    return fits and neuron.holds(q) and kernel_launch.attention_kernels()


def index_score(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, klen: torch.Tensor, entries: int | None = None
) -> torch.Tensor:
    """How well each entry of an index suits each query: the sum over heads of weight * relu(q . key), in fp32.

    Args:
        q: bf16 [..., heads, 128].
        keys: bf16 [128, n], or [sequences, 128, n]: queries of one sequence are consecutive, equally many for each.
        weights: fp32 [..., heads], with all constant factors; may be negative.
        klen: integers [...], how many entries, from the first on, a query may see.
        entries: how many entries of a sequence are scored; all unless given. Round it up to few different numbers:
            every one is another compiled kernel, but a cache that is mostly empty need not be read.

    Returns:
        fp32 [..., entries], -inf from klen on whatever the keys hold there.
    """
    count = keys.shape[-1] if entries is None else entries
    queries, factors, limits = q.flatten(0, -3), weights.float().flatten(0, -2), klen.int().flatten()
    if index_score_supported(q, keys):
        by_sequence = keys.reshape(-1, *keys.shape[-2:]).contiguous()
        launch = kernel_launch.kernel("index_score")
        scores = launch(queries.contiguous(), by_sequence, factors.contiguous(), limits.contiguous(), count)
    else:
        scores = reference.index_score(queries, keys[..., :count], factors, limits)
    return scores.reshape(*q.shape[:-2], count)  # type: ignore[no-any-return]


def top_k_positions(scores: torch.Tensor, klen: torch.Tensor, k: int) -> torch.Tensor:
    """The best min(k, klen) entries before klen: int32 [..., k], ascending, then -1.

    Args:
        scores: fp32 [..., n]. An entry that scores -inf is never chosen; which of equal ones win is not defined.
        klen: integers [...].
        k: length of the list.
    """
    chosen = reference.top_k(scores.flatten(0, -2), klen.flatten(), k)
    return chosen.reshape(*scores.shape[:-1], k)  # type: ignore[no-any-return]


def candidate_blocks(scores: torch.Tensor, klen: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` blocks of 8 entries with the highest single scores: int32 [..., count], ascending, then -1.

    scores fp32 [..., n], klen integers [...]. A query's last block, which may be partial, is always among them.
    """
    blocks = reference.candidate_blocks(scores.flatten(0, -2), klen.flatten(), count)
    return blocks.reshape(*scores.shape[:-1], count)  # type: ignore[no-any-return]


def within_candidates(scores: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """scores fp32 [..., n] with -inf outside of the blocks int32 [..., count] that candidate_blocks chose."""
    allowed = reference.within_candidates(scores.flatten(0, -2), blocks.flatten(0, -2))
    return allowed.reshape(scores.shape)  # type: ignore[no-any-return]


def candidate_scores_supported(q: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the kernel scores candidates: as `index_score_supported`, of whole blocks and at most 2^24 entries."""
    whole = rows.shape[-2] % CANDIDATE_BLOCK == 0 and rows.shape[:-1].numel() <= _ENTRIES_MAX
    return whole and index_score_supported(q, rows.transpose(-1, -2))


def candidate_scores(
    q: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, klen: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """`index_score` for the entries of each query's blocks alone: the others' keys are not read.

    Args:
        q: bf16 [..., heads, 128].
        rows: bf16 [n, 128] or [sequences, n, 128], a row an entry, n a multiple of 8; queries of one sequence are
            consecutive, equally many for each.
        weights: fp32 [..., heads].
        klen: integers [...].
        blocks: integers [..., count], as candidate_blocks lists them.

    Returns:
        fp32 [..., 8, count]: at [i, b] the score of entry 8 * blocks[b] + i; -inf for empty places and from klen on.
    """
    queries, factors, limits = q.flatten(0, -3), weights.float().flatten(0, -2), klen.int().flatten()
    lists = blocks.int().flatten(0, -2)
    if candidate_scores_supported(q, rows):
        by_sequence = rows.reshape(-1, *rows.shape[-2:]).contiguous()
        launch = kernel_launch.kernel("index_candidates")
        scores = launch(
            queries.contiguous(), by_sequence, factors.contiguous(), limits.contiguous(), lists.contiguous()
        )
    else:
        scores = reference.index_candidates(queries, rows, factors, limits, lists)
    return scores.reshape(*q.shape[:-2], CANDIDATE_BLOCK, blocks.shape[-1])  # type: ignore[no-any-return]


def top_k_candidates(scores: torch.Tensor, blocks: torch.Tensor, k: int) -> torch.Tensor:
    """The best entries of what `candidate_scores` gives: int32 [..., k], ascending, then -1.

    Args:
        scores: fp32 [..., 8, count]. An entry that scores -inf is never chosen.
        blocks: integers [..., count], ascending, then -1.
        k: length of the list.
    """
    by_entry = scores.transpose(-1, -2).flatten(-2)
    whole = torch.full(by_entry.shape[:-1], by_entry.shape[-1], device=scores.device)
    places = top_k_positions(by_entry, whole, k)
    block = torch.gather(blocks.long(), -1, places.clamp(min=0).long() >> _BLOCK_SHIFT)
    return torch.where(places < 0, -1, block * CANDIDATE_BLOCK + (places & (CANDIDATE_BLOCK - 1))).int()

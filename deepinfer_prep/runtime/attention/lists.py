"""Which rows of a cache a query attends to, and where a step's new rows go.

A window cache is a ring of `ring` rows a sequence: the token at position p of the sequence in place `state` lies in row
state * ring + p % ring. A compressed cache has pages of `page` entries: entry c of a sequence lies in row
block_table[c // page] * page + c % page. A list is int32 and holds -1 where an entry is empty.

Ratios, pages and, where steps are compiled, rings are powers of two: compilers divide other integers in fp32.
Positions, states and sequences are integers [t], one for each query, unless stated otherwise.
"""

from __future__ import annotations

import torch

__all__ = [
    "draft_lists",
    "entry_rows",
    "history_rows",
    "prefill_window_lists",
    "store_rows",
    "stored_entries",
    "visible_entries",
    "window_lists",
    "window_rows",
]

WINDOW = 128
"""Tokens that a query sees of its own sequence, itself included."""


def visible_entries(positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """How many compressed entries, from the first on, a query sees (klen): those of complete groups, int32."""
    return ((positions + 1) // ratio).int()


def window_rows(states: torch.Tensor, positions: torch.Tensor, ring: int) -> torch.Tensor:
    """The row of the ring that holds a token, int32; -1 for positions below 0."""
    return torch.where(positions < 0, -1, states * ring + positions % ring).int()


def window_lists(states: torch.Tensor, positions: torch.Tensor, ring: int, width: int = WINDOW) -> torch.Tensor:
    """The last `width` tokens of a ring up to each query's position: int32 [t, width], oldest first, then -1.

    A step of several tokens a sequence stores all of them first, so the ring has room for `width` tokens and all but
    one of a step.
    """
    seen = _last_positions(positions, width)
    return window_rows(states.unsqueeze(-1), seen, ring)


def history_rows(states: torch.Tensor, starts: torch.Tensor, ring: int, width: int = WINDOW) -> torch.Tensor:
    """Rows of the ring that hold the `width` tokens before a step: int32 [sequences, width], -1 before position 0.

    Args:
        states: integers [sequences].
        starts: integers [sequences], the position of the step's first token in each.
        ring: rows of a ring.
        width: length of the window.
    """
    places = torch.arange(width, device=starts.device)
    return window_rows(states.unsqueeze(-1), starts.unsqueeze(-1) - width + places, ring)


def prefill_window_lists(
    sequences: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    first_tokens: torch.Tensor,
    width: int = WINDOW,
) -> torch.Tensor:
    """Windows in the rows of a prefill step: `width` rows of history for each sequence, then the step's tokens.

    Args:
        sequences: which sequence of the step a query belongs to.
        positions: of the queries.
        starts: integers [sequences], the position of the step's first token in each.
        first_tokens: integers [sequences], where a sequence's tokens begin among the step's.
        width: length of the window.

    Returns:
        int32 [t, width], oldest first, then -1.
    """
    seen = _last_positions(positions, width)
    of_query = sequences.long()
    local = seen - starts[of_query].unsqueeze(-1)
    history = sequences.unsqueeze(-1) * width + width + local
    fresh = starts.shape[0] * width + first_tokens[of_query].unsqueeze(-1) + local
    return torch.where(seen < 0, -1, torch.where(local < 0, history, fresh)).int()


def draft_lists(
    states: torch.Tensor, lengths: torch.Tensor, ring: int, block: int, first_row: int, width: int = WINDOW
) -> torch.Tensor:
    """Lists of a draft layer: the window of what is accepted and the whole block of drafts, which see one another.

    Args:
        states: integers [sequences].
        lengths: integers [sequences], how many tokens of each sequence are accepted.
        ring: rows of a ring.
        block: drafts of a sequence.
        first_row: the row of the first sequence's first draft; those of a sequence follow one another.
        width: length of the window.

    Returns:
        int32 [sequences * block, width + block].
    """
    window = window_lists(states, lengths - 1, ring, width)
    count = states.shape[0]
    drafts = torch.arange(count * block, device=states.device, dtype=torch.int32).reshape(count, block) + first_row
    return torch.cat([window, drafts], dim=-1).repeat_interleave(block, dim=0)


def entry_rows(entries: torch.Tensor, block_tables: torch.Tensor, sequences: torch.Tensor, page: int) -> torch.Tensor:
    """Rows of a compressed cache for lists of a sequence's entries: int32 [..., k], -1 kept.

    Args:
        entries: integers [t, k], or [t].
        block_tables: integers [sequences, pages], the page numbers of each sequence in order.
        sequences: which line of block_tables a query belongs to.
        page: entries of a page, a power of two.
    """
    known = torch.where(entries < 0, 0, entries)
    lines = sequences.reshape(-1, *[1] * (entries.dim() - 1)).long()
    pages = block_tables[lines, (known // page).long()]
    return torch.where(entries < 0, -1, pages * page + known % page).int()


def stored_entries(positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """The entry whose group a token completes, int32; -1 where its group stays open and nothing is stored."""
    entries = visible_entries(positions, ratio)
    return torch.where((positions + 1) % ratio == 0, entries - 1, -1).int()


def store_rows(cache: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write values [m, d] into rows integers [m] of cache [n, d], in place; into the last one for a row below 0."""
    places = torch.where(rows < 0, cache.shape[0] - 1, rows).long()
    cache.index_put_((places,), values.to(cache.dtype))


def _last_positions(positions: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` positions up to each one, oldest first; -1 behind those of a sequence that is shorter."""
    seen = (positions.unsqueeze(-1) - width + 1).clamp(min=0) + torch.arange(width, device=positions.device)
    return torch.where(seen <= positions.unsqueeze(-1), seen, -1)

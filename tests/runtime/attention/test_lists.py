"""Lists of rows against plain loops over tokens."""

from __future__ import annotations

import pytest
import torch

from deepinfer_prep.runtime import attention


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_query_sees_complete_groups_only(ratio: int) -> None:
    positions = torch.arange(20)
    found = attention.visible_entries(positions, ratio)
    assert found.dtype == torch.int32
    for p in range(20):
        assert found[p] == sum((j + 1) * ratio <= p + 1 for j in range(20))


@pytest.mark.parametrize("ring", [8, 11])
def test_windows_hold_the_last_tokens_of_the_ring(ring: int) -> None:
    found = attention.window_lists(ints(0, 3, 3, 1), ints(0, 6, 29, 7), ring, width=8)
    for row, state, position in zip(found.tolist(), (0, 3, 3, 1), (0, 6, 29, 7), strict=True):
        seen = range(max(0, position - 7), position + 1)
        assert row == [state * ring + p % ring for p in seen] + [-1] * (8 - len(seen))


def test_prefill_windows_reach_back_into_history() -> None:
    """Two sequences that go on from positions 3 and 20 with 5 and 2 tokens, windows of 4."""
    starts, first_tokens = ints(3, 20), ints(0, 5)
    sequences, positions = ints(0, 0, 0, 0, 0, 1, 1), ints(3, 4, 5, 6, 7, 20, 21)
    found = attention.prefill_window_lists(sequences, positions, starts, first_tokens, width=4)
    history = attention.history_rows(ints(7, 2), starts, 8, width=4)
    names = {row: (0, -1 + row) if row < 4 else (1, 12 + row) for row in range(8)}
    names |= {8 + i: (int(s), int(p)) for i, (s, p) in enumerate(zip(sequences, positions, strict=True))}
    for row, s, p in zip(found.tolist(), sequences.tolist(), positions.tolist(), strict=True):
        seen = range(max(0, p - 3), p + 1)
        assert [names[r] for r in row if r >= 0] == [(s, q) for q in seen]
        assert row[len(seen) :] == [-1] * (4 - len(seen))
    assert history.tolist() == [[-1, 56, 57, 58], [2 * 8 + q % 8 for q in range(16, 20)]]


def test_drafts_see_the_window_and_their_whole_block() -> None:
    found = attention.draft_lists(ints(0, 2), ints(3, 10), ring=8, block=2, first_row=100, width=4)
    first, second = [0, 1, 2, -1, 100, 101], [16 + p % 8 for p in range(6, 10)] + [102, 103]
    assert found.tolist() == [first, first, second, second]
    assert found.dtype == torch.int32


def test_entries_are_found_by_their_page() -> None:
    tables = ints(4, 0, 9, 7, 2, 5).view(2, 3)
    entries = ints(0, 3, 4, -1, 11, 8).view(2, 3)
    found = attention.entry_rows(entries, tables, ints(1, 0), page=4)
    assert found.tolist() == [[28, 31, 8], [-1, 39, 36]]
    assert attention.entry_rows(ints(5, -1), tables, ints(0, 1), page=4).tolist() == [1, -1]


def test_a_group_is_stored_by_its_last_token() -> None:
    assert attention.stored_entries(torch.arange(7), 2).tolist() == [-1, 0, -1, 1, -1, 2, -1]
    assert attention.stored_entries(torch.arange(3), 1).tolist() == [0, 1, 2]


def test_what_is_not_stored_goes_to_the_last_row() -> None:
    cache = torch.zeros(5, 2)
    attention.store_rows(cache, ints(3, -1, 0), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert cache.tolist() == [[5.0, 6.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]

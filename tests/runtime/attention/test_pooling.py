"""The compressor's steps against one pool over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_prep.errors import PrepError
from deepinfer_prep.kernels.attention_reference import compress_pool
from deepinfer_prep.runtime import attention

GENERATOR = torch.Generator().manual_seed(0)
D = 16


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tokens(count: int) -> tuple[Tensor, Tensor]:
    score, latent = torch.randn(2, count, D, generator=GENERATOR)
    return score, latent


def pooled(score: Tensor, latent: Tensor, ratio: int) -> Tensor:
    """All complete groups of a sequence: bf16 [groups, D]."""
    whole = score.shape[0] // ratio * ratio
    return compress_pool(score[:whole].view(-1, ratio, D), latent[:whole].view(-1, ratio, D))


def decode(state: Tensor, slots: Tensor, lens: Tensor, score: Tensor, latent: Tensor, ratio: int) -> Tensor:
    return attention.compress_and_update_state_decode(score, latent, state, slots, lens, 6, ratio)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_token_by_token_gives_the_pool_of_the_whole(ratio: int) -> None:
    state = torch.full((3, 16, 2, D), torch.nan)
    score, latent = tokens(21)
    expected = pooled(score, latent, ratio)
    for p in range(21):
        found = decode(state, ints(1), ints(p + 1), score[p : p + 1], latent[p : p + 1], ratio)
        complete = (p + 1) % ratio == 0
        assert torch.equal(found[0], expected[p // ratio] if complete else torch.zeros(D).bfloat16())


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_ring_of_any_length_may_be_a_part_of_another_tensor(ratio: int) -> None:
    """138 rows, as serving engines keep, beside what others keep in the same rows."""
    shared = torch.full((3, 138, 5, D), torch.nan)
    state = shared[:, :, 1:3]
    score, latent = tokens(300)
    expected = pooled(score, latent, ratio)
    for p in range(0, 300, 6):
        lens = torch.arange(p + 1, p + 7, dtype=torch.int32)
        found = decode(state, torch.full((6,), 2), lens, score[p : p + 6], latent[p : p + 6], ratio)
        assert torch.equal(found[ratio - 1 :: ratio], expected[p // ratio : (p + 6) // ratio])
    assert torch.equal(state[2, 299 % 138], torch.stack([score[299], latent[299]]))
    assert shared[:, :, [0, 3, 4]].isnan().all()
    assert shared[:2].isnan().all()


def test_rejected_drafts_are_overwritten() -> None:
    """Five tokens a step, of which two are rejected and come again as others."""
    state = torch.full((1, 16, 2, D), torch.nan)
    score, latent = tokens(32)
    expected, found = pooled(score, latent, 2), {}
    p = 0
    while p < 27:
        draft_score, draft_latent = score[p : p + 5].clone(), latent[p : p + 5].clone()
        draft_score[3:], draft_latent[3:] = tokens(2)
        lens = torch.arange(p + 1, p + 6, dtype=torch.int32)
        rows = decode(state, torch.zeros(5, dtype=torch.int32), lens, draft_score, draft_latent, 2)
        found.update({(p + i) // 2: rows[i] for i in range(3) if (p + i) % 2 == 1})
        p += 3
    assert sorted(found) == list(range(13))
    assert all(torch.equal(row, expected[group]) for group, row in found.items())


def test_a_ring_that_is_too_small_is_refused() -> None:
    with pytest.raises(PrepError, match="need 7"):
        decode(torch.zeros(1, 6, 2, D), ints(0), ints(1), *tokens(1), ratio=2)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("chunks", [(13,), (7, 6), (1, 1, 11), (3, 9, 1), (2, 2, 9)])
def test_prefill_in_chunks_that_split_groups_gives_the_pool_of_the_whole(ratio: int, chunks: tuple[int, ...]) -> None:
    """A second sequence is always a token ahead, so that the two split their groups differently."""
    state = torch.full((4, 5, 2, D), torch.nan)
    first, second = tokens(13), tokens(14)
    found: list[list[Tensor]] = [[], []]
    begin = [0, 0]
    for step, size in enumerate(chunks):
        sizes = [size, size + 1 if step == 0 else size]
        ends = [b + n for b, n in zip(begin, sizes, strict=True)]
        parts = [torch.cat([one[0][b:e] for one, b, e in zip((first, second), begin, ends, strict=True)])]
        parts.append(torch.cat([one[1][b:e] for one, b, e in zip((first, second), begin, ends, strict=True)]))
        groups = [e // ratio - b // ratio for b, e in zip(begin, ends, strict=True)]
        rows = [max(1, n) for n in groups]
        mapping = ints(*[0] * rows[0], *[1] * rows[1])
        out = attention.compress_and_update_state_prefill(
            *parts, state, ints(2, 0), mapping, ints(0, sizes[0], sum(sizes)), ints(0, ends[0], sum(ends)),
            ints(0, rows[0], sum(rows)), ratio,
        )  # fmt: skip
        for s, (start, count) in enumerate(zip((0, rows[0]), groups, strict=True)):
            found[s].append(out[start : start + count])
            assert not out[start + count : start + rows[s]].any()
        begin = ends
    for (score, latent), parts in zip((first, second), found, strict=True):
        assert torch.equal(torch.cat(parts), pooled(score, latent, ratio))
    for slot, one in ((2, first), (0, second)):
        count = one[0].shape[0]
        for p in range(count - 5, count):
            assert torch.equal(state[slot, p % 5], torch.stack([one[0][p], one[1][p]]))
    assert state[[1, 3]].isnan().all()


def test_decode_goes_on_where_prefill_ended() -> None:
    state = torch.full((1, 8, 2, D), torch.nan)
    score, latent = tokens(8)
    attention.compress_and_update_state_prefill(
        score[:7], latent[:7], state, ints(0), ints(0, 0, 0), ints(0, 7), ints(0, 7), ints(0, 3), 2
    )
    found = decode(state, ints(0), ints(8), score[7:], latent[7:], 2)
    assert torch.equal(found, pooled(score, latent, 2)[3:])


def test_an_order_of_tokens_is_refused() -> None:
    bounds = ints(0, 1)
    with pytest.raises(PrepError, match="mirror_cp_reverse_index"):
        attention.compress_and_update_state_prefill(
            *tokens(1),
            torch.zeros(1, 8, 2, D),
            ints(0),
            ints(0),
            bounds,
            bounds,
            bounds,
            2,
            ints(0),  # type: ignore[arg-type]
        )

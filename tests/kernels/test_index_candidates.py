"""Scores of candidates against those of all entries: the same bits wherever both score."""

from __future__ import annotations

import pytest
import torch
from nki_emulator import installed, run

from deepinfer_prep.kernels import attention_reference as reference
from tests.kernels.test_index_score import Case

with installed():
    from deepinfer_prep.kernels import index_candidates, index_score

SIZE = reference.CANDIDATE_BLOCK


class Candidates(Case):
    """A case with lists of blocks: random ones, ascending, and empty places at the end."""

    def __init__(self, tokens: int, n: int, count: int, heads: int = 32, sequences: int = 1) -> None:
        super().__init__(tokens, n, heads, sequences)
        generator = torch.Generator().manual_seed(count)
        self.blocks = torch.full((tokens, count), -1, dtype=torch.int32)
        for row in self.blocks:
            some = torch.randperm(n // SIZE, generator=generator)[: max(1, count - 3)].sort().values
            row[: len(some)] = some.int()

    def candidates(self, grid: int | None = None) -> torch.Tensor:
        rows = self.keys.transpose(1, 2).contiguous()
        return run(index_candidates.kernel, self.q, rows, self.weights, self.klen, self.blocks, grid=grid).output

    def expected(self) -> torch.Tensor:
        """The kernel's scores of all entries, each query launched by itself, at the lists' places."""
        entries = self.blocks.long().clamp(min=0).unsqueeze(1) * SIZE + torch.arange(SIZE).unsqueeze(-1)
        each = self.q.shape[0] // self.keys.shape[0]
        alone = [
            run(
                index_score.kernel,
                self.q[row : row + 1],
                self.keys[row // each : row // each + 1],
                self.weights[row : row + 1],
                self.klen[row : row + 1],
                self.keys.shape[-1],
            ).output
            for row in range(self.q.shape[0])
        ]
        scores = torch.cat(alone).gather(1, entries.flatten(1)).reshape(entries.shape)
        return torch.where((self.blocks < 0).unsqueeze(1), -torch.inf, scores)


@pytest.mark.parametrize("count", [1, 2, 5, 127, 128, 200])
@pytest.mark.parametrize("tokens", [1, 3])
def test_scores_are_those_of_all_entries(tokens: int, count: int) -> None:
    case = Candidates(tokens, 1608, count)
    case.klen[0] = 1605
    found = case.candidates()
    assert found.shape == (tokens, SIZE, count)
    assert torch.equal(found, case.expected())
    assert torch.equal(found, case.candidates(grid=2))


@pytest.mark.parametrize(("tokens", "heads", "sequences"), [(18, 32, 1), (9, 64, 1), (4, 32, 2)])
def test_many_queries_other_heads_and_several_sequences(tokens: int, heads: int, sequences: int) -> None:
    case = Candidates(tokens, 256, 20, heads, sequences)
    found = case.candidates(grid=2)
    assert torch.equal(found, case.expected())
    plain = reference.index_candidates(case.q, case.keys.transpose(1, 2), case.weights, case.klen, case.blocks)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_more_groups_than_share_a_transpose() -> None:
    case = Candidates(1, 17 * 128 * SIZE, 17 * 128 + 4)
    case.klen[:] = case.keys.shape[2] - 3
    assert torch.equal(case.candidates(grid=2), case.expected())


def test_empty_places_stand_anywhere_and_name_no_memory() -> None:
    case = Candidates(3, 256, 12)
    case.klen[:] = torch.tensor([0, 100, 256])
    case.blocks[:, 2:5], case.blocks[2] = -1, -7
    case.keys[:, :, 100:] = torch.nan
    case.klen[2] = 100
    found = case.candidates()
    assert not found.isnan().any()
    assert (found[0] == -torch.inf).all()
    assert (found[2] == -torch.inf).all()
    assert (found[1, :, 2:5] == -torch.inf).all()
    assert (found[1] > -torch.inf).any()

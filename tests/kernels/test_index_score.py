"""The index score kernel against float64; one core and two agree bit for bit."""

from __future__ import annotations

import pytest
import torch
from nki_emulator import Options, installed, run

from deepinfer_prep.kernels import attention_reference as reference
from deepinfer_prep.kernels import cache_records
from tests.kernels.cases import ON_SIMULATOR

with installed():
    from deepinfer_prep.kernels import index_score

FACTOR = 128**-0.5 * 32**-0.5


def fp4_round_trip(x: torch.Tensor) -> torch.Tensor:
    """x [..., 128] as an index holds it: exact in bf16."""
    return cache_records.decode_e2m1_blocks(*cache_records.encode_e2m1(x.float())).bfloat16()


class Case:
    """Queries and keys of `sequences` sequences, and what float64 makes of them."""

    def __init__(self, tokens: int, n: int, heads: int = 32, sequences: int = 1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed + tokens + n)
        self.q = fp4_round_trip(torch.randn(tokens, heads, 128, generator=generator))
        rows = fp4_round_trip(torch.randn(sequences, n, 128, generator=generator))
        self.keys = rows.transpose(1, 2).contiguous()
        self.weights = torch.randn(tokens, heads, generator=generator).bfloat16().float() * FACTOR
        self.klen = torch.randint(0, n + 1, (tokens,), generator=generator).int()

    def run(self, grid: int | None = None, entries: int = 0, options: Options | None = None) -> torch.Tensor:
        count = entries or self.keys.shape[-1]
        arguments = self.q, self.keys, self.weights, self.klen, count
        return run(index_score.kernel, *arguments, grid=grid, options=options).output

    def check(self, found: torch.Tensor) -> None:
        """Within 2^-20 of the terms' magnitudes, -inf exactly where nothing is visible."""
        assert found.dtype == torch.float32
        visible = torch.arange(found.shape[1]) < self.klen.unsqueeze(-1)
        assert torch.equal(found == -torch.inf, ~visible)
        keys = self.keys[..., : found.shape[1]]
        exact = reference.index_score_values(self.q, keys, self.weights, torch.float64)
        magnitude = reference.index_score_values(self.q, keys, self.weights.abs(), torch.float64)
        assert ((found.double() - exact).abs() <= 2.0**-20 * magnitude + 2.0**-126)[visible].all()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2)."""
    x, y = found.double().flatten(), exact.double().flatten()
    return float(1 - 2 * (x @ y) / (x @ x + y @ y))


@pytest.mark.parametrize("n", [1, 7, 8, 511, 512, 513, 4096])
@pytest.mark.parametrize("tokens", [1, 5])
def test_scores(tokens: int, n: int) -> None:
    case = Case(tokens, n)
    case.klen[:3] = torch.tensor([n, 0, 1], dtype=torch.int32)[:tokens]
    found = case.run()
    case.check(found)
    assert torch.equal(found, case.run())
    assert torch.equal(found, case.run(grid=2))


@pytest.mark.parametrize(("tokens", "heads"), [(3, 64), (20, 32), (130, 32), (9, 64), (17, 8)])
def test_many_queries_and_other_heads(tokens: int, heads: int) -> None:
    case = Case(tokens, 300, heads)
    found = case.run()
    case.check(found)
    assert torch.equal(found, case.run(grid=2))


@pytest.mark.parametrize(("sequences", "each"), [(3, 1), (2, 4), (2, 17)])
def test_each_sequence_is_scored_against_its_own_keys(sequences: int, each: int) -> None:
    case = Case(sequences * each, 200, sequences=sequences)
    case.check(case.run(grid=2))


def test_more_entries_than_are_held_at_a_time() -> None:
    case = Case(2, 2 * index_score.CHUNK + 200)
    found = case.run()
    case.check(found)
    assert torch.equal(found, case.run(grid=2))


@pytest.mark.parametrize("entries", [1, 128, 200])
def test_only_the_entries_that_are_asked_for_are_scored(entries: int) -> None:
    case = Case(3, 500)
    found = case.run(entries=entries)
    assert found.shape == (3, entries)
    case.check(found)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_lies_behind_the_last_visible_entry_never_shows(junk: float) -> None:
    case = Case(3, 300)
    case.klen[:] = torch.tensor([150, 7, 149])
    sound = case.run()
    case.keys[:, :, 150:] = junk
    assert torch.equal(case.run(), sound)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("row", range(8))
def test_nan_in_a_query_stays_in_its_row(row: int, heads: int) -> None:
    case = Case(8, 200, heads)
    case.klen[:] = 200
    sound = case.run()
    case.q[row, 3, 9] = torch.nan
    found = case.run()
    others = [index for index in range(8) if index != row]
    assert torch.equal(found[others], sound[others])
    assert found[row].isnan().all()


def test_heads_without_a_positive_product_score_zero() -> None:
    case = Case(2, 140)
    case.q, case.keys = case.q.abs(), -case.keys.abs()
    case.klen[:] = 140
    assert torch.equal(case.run(), torch.zeros(2, 140))


def test_scales_far_apart() -> None:
    case = Case(4, 260)
    case.q[:, ::2] *= 2.0**20
    case.keys[:, :, ::3] *= 2.0**-20
    case.check(case.run())


def test_the_distance_to_fp32_is_below_what_the_official_tests_allow() -> None:
    case = Case(4, 512)
    case.klen[:] = 512
    exact = reference.index_score_values(case.q, case.keys, case.weights, torch.float32)
    assert distance(case.run(), exact) < 5e-6


def test_the_distance_with_rounded_weights_and_scores_and_to_values_that_were_never_rounded() -> None:
    generator = torch.Generator().manual_seed(9)
    q, keys = torch.randn(4, 32, 128, generator=generator), torch.randn(512, 128, generator=generator)
    weights = torch.randn(4, 32, generator=generator) * FACTOR
    case = Case(4, 512)
    case.klen[:] = 512
    case.q, case.keys = fp4_round_trip(q), fp4_round_trip(keys).T.contiguous().unsqueeze(0)
    case.weights = weights.bfloat16().float()
    found = case.run().bfloat16()
    assert distance(found, reference.index_score_values(case.q, case.keys, weights, torch.float32)) < 3e-5
    assert distance(found, reference.index_score_values(q, keys.T.unsqueeze(0), weights, torch.float32)) < 0.02


@pytest.mark.skipif(ON_SIMULATOR, reason="flushing is an option of the emulator")
def test_flushed_subnormals_change_nothing() -> None:
    case = Case(3, 200)
    assert torch.equal(case.run(options=Options(flush_subnormals=True)), case.run())

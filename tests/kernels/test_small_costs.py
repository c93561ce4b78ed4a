"""What the cost model says of index scores, pools and fused forms, on which docs/fused_kernels.md relies."""

from __future__ import annotations

import pytest

from tests.kernels import small_models
from tests.kernels.cases import ON_SIMULATOR
from tests.kernels.fusions import FUSIONS, verdict
from tests.kernels.small_models import index_model, pool_model

pytestmark = pytest.mark.skipif(ON_SIMULATOR, reason="AWS's simulator keeps no record of instructions")


def test_scores_of_one_query_are_bound_by_memory() -> None:
    model = index_model(1, 16384)
    assert model.cost.bound_by in ("dma", "hbm")
    assert model.ratio < 1.2
    assert model.pessimistic_ratio < 1.4


@pytest.mark.parametrize(("tokens", "most"), [(4, 1.8), (16, 5.0), (128, 17.0)])
def test_queries_of_one_sequence_keep_tensor_and_vector_engines_busy(tokens: int, most: float) -> None:
    assert index_model(tokens, 8192).pessimistic_ratio < most


def test_large_models_are_the_line_through_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = index_model(2, 65536)
    monkeypatch.setattr(small_models, "LONG", 16384)
    assert index_model(2, 65536).cell() == whole.cell()
    three = index_model(3, 1024, 3).cost.slowest.seconds
    one, two = (index_model(n, 1024, n).cost.slowest.seconds for n in (1, 2))
    assert three["vector"] == pytest.approx(2 * two["vector"] - one["vector"])


def test_a_pool_of_two_costs_little_more_than_its_memory() -> None:
    assert pool_model(128).ratio < 2


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_fusing_pays_where_it_saves_calls_that_torch_cannot_save(fusion) -> None:
    one = verdict(fusion, 1)
    needed = sum(step.moved is None for step in fusion.steps(1))
    assert one.pays == (needed > 1)

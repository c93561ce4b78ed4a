"""The modelled cost of the attention kernels keeps the limits that decided their design."""

from __future__ import annotations

import pytest

from tests.kernels.attention_models import compressed_model, dense_window_model, window_list_model
from tests.kernels.cases import ON_SIMULATOR

pytestmark = pytest.mark.skipif(ON_SIMULATOR, reason="AWS's simulator keeps no record of instructions")


@pytest.mark.parametrize("tokens", [4, 16])
def test_gathered_attention_stays_near_the_memory_floor_in_both_columns(tokens: int) -> None:
    model = compressed_model(tokens)
    assert model.ratio <= 1.8, model.cell()
    assert model.pessimistic_ratio <= 1.9, model.cell()


def test_the_length_of_the_context_changes_nothing() -> None:
    assert len({compressed_model(4, rows).cell() for rows in (4096, 65536, 1048576)}) == 1


def test_a_dense_window_costs_less_than_one_of_lists() -> None:
    dense, lists = dense_window_model(64), window_list_model(64)
    assert dense.cost.bound < 0.7 * lists.cost.bound, f"{dense.cell()}, {lists.cell()}"
    assert dense.pessimistic.bound < 0.8 * lists.pessimistic.bound, f"{dense.cell()}, {lists.cell()}"


def test_two_cores_halve_the_time() -> None:
    one, two = (compressed_model(16, cores=cores).cost.bound for cores in (1, 2))
    assert 1.8 <= one / two <= 2.1

"""max8, nc_find_index8, nc_match_replace8: alone, with equal values, and as rounds that sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nki_emulator import isa as nisa
from nki_emulator import language as nl

from tests.emulator.support import P, empty, execute, load, on_tiles, random, store


def test_max8_gives_the_eight_largest_in_descending_order() -> None:
    data = random((P, 3, 40))

    def body(x: Any) -> Any:
        out = empty((P, 8))
        nisa.max8(dst=out, src=x)
        return out

    np.testing.assert_array_equal(on_tiles(body, data), -np.sort(-data.reshape(P, -1), axis=1)[:, :8])


@pytest.mark.parametrize("dtype", [nl.uint16, nl.uint32])
def test_places_of_distinct_values(dtype: Any) -> None:
    data = random((P, 64))
    wanted = data[:, ::8].copy()

    def body(x: Any, y: Any) -> Any:
        out = empty((P, 8), dtype)
        nisa.nc_find_index8(dst=out, data=x, vals=y)
        return out

    np.testing.assert_array_equal(on_tiles(body, data, wanted), np.broadcast_to(np.arange(0, 64, 8), (P, 8)))


def test_equal_values_are_paired_upwards_by_find_and_downwards_by_replace() -> None:
    """The example of the documentation of nc_match_replace8."""
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    wanted = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)

    def body(x: Any, y: Any) -> Any:
        tiles = load(x), load(y)
        found, places, replaced = empty((1, 8), nl.uint32), empty((1, 8), nl.uint32), empty((1, 11))
        nisa.nc_find_index8(dst=found, data=tiles[0], vals=tiles[1])
        nisa.nc_match_replace8(dst=replaced, data=tiles[0], vals=tiles[1], imm=-1.0, dst_idx=places)
        return store(found), store(places), store(replaced)

    found, places, replaced = execute(body, data, wanted).outputs
    assert found.tolist() == [[2, 4, 5, 6, 7, 8, 9, 10]]
    assert places.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    assert replaced.tolist() == [[1, 2, -1, 4, *[-1] * 7]]


def test_rounds_sort_the_largest_values_in_place() -> None:
    data = np.random.default_rng(0).integers(-20, 20, (P, 96)).astype(np.float32)

    def body(x: Any) -> Any:
        out = empty((P, 32))
        for first in range(0, 32, 8):
            nisa.max8(dst=out[:, first : first + 8], src=x)
            nisa.nc_match_replace8(dst=x, data=x, vals=out[:, first : first + 8], imm=-1e30)
        return out

    np.testing.assert_array_equal(on_tiles(body, data), -np.sort(-data, axis=1)[:, :32])

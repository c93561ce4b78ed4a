"""Work on a few threads: the order in which it is handed out."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_prep.workers import interleave


def test_interleaving_takes_from_each_source_in_turn() -> None:
    assert list(interleave(["aaa", "b", "cc", "dd"], 2)) == list("abacacdd")


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 10))
def test_interleaving_loses_nothing_and_keeps_the_order_within_a_source(lengths: list[int], width: int) -> None:
    opened, ended = set(), set()

    def source(number: int) -> Iterator[tuple[int, int]]:
        for item in range(lengths[number]):
            opened.add(number)
            assert len(opened - ended) <= width
            yield number, item
        ended.add(number)

    taken = list(interleave(map(source, range(len(lengths))), width))
    for number, length in enumerate(lengths):
        assert [item for owner, item in taken if owner == number] == list(range(length))
    assert len(taken) == sum(lengths)

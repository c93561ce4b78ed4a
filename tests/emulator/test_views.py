"""Views address the same elements as NumPy's; random chains of them, on chip and in HBM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nki_emulator import geometry
from nki_emulator import isa as nisa
from nki_emulator import language as nl

from tests.emulator.support import P, empty, execute, load, on_tiles, random, store, tile


def copied(view: Any) -> Any:
    """A view's elements in a fresh tile."""
    out = empty(view.shape, view.dtype)
    nisa.tensor_copy(dst=out, src=view)
    return out


VALUES = random((P, 6, 8))
VIEWS = {
    "slice": (lambda t: t[:, 1:5, 2:8:3], lambda a: a[:, 1:5, 2:8:3]),
    "negative": (lambda t: t[:, -2, -4:], lambda a: a[:, -2, -4:]),
    "integers": (lambda t: t[:, 3, 5], lambda a: a[:, 3, 5:6]),
    "one partition": (lambda t: t[64, 1:3], lambda a: a[64:65, 1:3]),
    "ellipsis": (lambda t: t[..., 0:2], lambda a: a[..., 0:2]),
    "ds": (lambda t: t[:, nl.ds(2, 3)], lambda a: a[:, 2:5]),
    "method slice": (lambda t: t.slice(2, 1, 7, 2), lambda a: a[:, :, 1:7:2]),
    "select": (lambda t: t.select(1, 4), lambda a: a[:, 4]),
    "reshape": (lambda t: t.reshape((P, 3, 16)), lambda a: a.reshape(P, 3, 16)),
    "reshape a slice": (lambda t: t[:, 2:4].reshape((P, 16)), lambda a: a[:, 2:4].reshape(P, 16)),
    "permute": (lambda t: t.permute((0, 2, 1)), lambda a: a.transpose(0, 2, 1)),
    "expand": (lambda t: t.expand_dim(2), lambda a: a[:, :, None]),
    "squeeze": (lambda t: t[:, 0:1].squeeze_dim(1), lambda a: a[:, 0]),
    "split": (lambda t: t.reshape_dim(2, (2, 4)), lambda a: a.reshape(P, 6, 2, 4)),
    "flatten": (lambda t: t.flatten_dims(1, 2), lambda a: a.reshape(P, 48)),
    "broadcast": (
        lambda t: t[:, :, 0].expand_dim(2).broadcast(2, 4),
        lambda a: np.repeat(a[:, :, 0:1], 4, axis=2),
    ),
    "ap": (
        lambda t: t.ap(pattern=[[48, 64], [8, 3], [2, 4]], offset=64 * 48 + 8),
        lambda a: a[64:128, 1:4, 0:8:2],
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_on_chip(name: str) -> None:
    view, expected = VIEWS[name]
    np.testing.assert_array_equal(on_tiles(lambda t: copied(view(t)), VALUES), expected(VALUES))


def test_integers_drop_dimensions_in_hbm() -> None:
    def body(a: Any) -> Any:
        assert a[2].shape == (6, 8)
        assert a[2, 3, 4].shape == (1,)
        assert a[2, 3].shape == (8,)
        out = empty((6, 8))
        nisa.dma_copy(dst=out, src=a[2])
        return store(out)

    np.testing.assert_array_equal(execute(body, VALUES).output, VALUES[2])


def test_rows_of_hbm_are_broadcast_to_partitions() -> None:
    row = random((3, 8))

    def body(a: Any) -> Any:
        out = empty((P, 8))
        nisa.dma_copy(dst=out, src=a.ap(pattern=[[0, P], [1, 8]], offset=16))
        return store(out)

    np.testing.assert_array_equal(execute(body, row).output, np.repeat(row[2:3], P, axis=0))


def test_hbm_to_hbm_with_a_repeated_dimension() -> None:
    values = random((5, 8))

    def body(a: Any) -> Any:
        out = nl.ndarray((5, 4, 8), dtype=a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=a.ap(pattern=[[8, 5], [0, 4], [1, 8]]))
        return out

    np.testing.assert_array_equal(execute(body, values).output, np.repeat(values[:, None], 4, axis=1))


def test_bytes_seen_as_other_types() -> None:
    data = np.random.default_rng(0).integers(0, 256, (P, 32)).astype(np.uint8)

    def body(t: Any) -> Any:
        assert t.view(nl.int32).shape == (P, 8)
        words = copied(t[:, 4:12].view(nl.int32))
        assert words.dtype == nl.int32
        return words.view(nl.uint8)

    np.testing.assert_array_equal(on_tiles(body, data), data[:, 4:12])


def test_ap_reinterprets_with_the_new_elements_strides() -> None:
    data = np.random.default_rng(0).integers(0, 256, (P, 32)).astype(np.uint8)

    def body(t: Any) -> Any:
        return copied(t.ap(pattern=[[8, P], [2, 4]], offset=1, dtype=nl.uint32))

    np.testing.assert_array_equal(on_tiles(body, data), data.view(np.uint32)[:, 1::2])


def test_writes_go_through_views() -> None:
    def body() -> Any:
        t = tile((P, 4, 4), value=0.0)
        nisa.memset(dst=t.permute((0, 2, 1))[:, 1], value=2.0)
        return store(t)

    expected = np.zeros((P, 4, 4))
    expected[:, :, 1] = 2
    np.testing.assert_array_equal(execute(body).output, expected)


def test_a_tensor_can_be_asked_for_its_layout() -> None:
    def body() -> None:
        t = empty((P, 4, 6), nl.bfloat16)
        assert (t.ndim, t.shape, t.strides, t.offset) == (3, (P, 4, 6), (24, 6, 1), 0)
        assert t.get_pattern() == [[24, P], [6, 4], [1, 6]]
        assert t.is_contiguous()
        assert not t[:, :, 0:2].is_contiguous()
        assert not t.is_indirect()
        assert t != None  # noqa: E711 - what a kernel writes for `is not None`
        assert t.dtype == nl.bfloat16
        assert t.buffer == nl.sbuf

    execute(body)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chains_of_views_agree_with_numpy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    array = np.arange(4 * int(np.prod(shape)), dtype=np.float32).reshape(4, *shape)

    def body(a: Any) -> Any:
        view, expected = load(a), array
        for _ in range(data.draw(st.integers(1, 4))):
            axis = data.draw(st.integers(1, view.ndim - 1))
            size = view.shape[axis]
            kind = data.draw(st.sampled_from(["slice", "expand", "permute", "reshape"]))
            if kind == "slice":
                start = data.draw(st.integers(0, size - 1))
                step = data.draw(st.integers(1, 3))
                view, expected = view.slice(axis, start, size, step), expected.swapaxes(0, axis)[start::step]
                expected = expected.swapaxes(0, axis)
            elif kind == "expand" and view.ndim < 5:
                view, expected = view.expand_dim(axis), np.expand_dims(expected, axis)
            elif kind == "permute":
                order = [0, *data.draw(st.permutations(range(1, view.ndim)))]
                view, expected = view.permute(order), expected.transpose(order)
            elif view.is_contiguous():
                flat = (4, geometry.count(view.shape[1:]))
                view, expected = view.reshape(flat), expected.reshape(flat)
        np.testing.assert_array_equal(view.array(), expected)

    execute(body, array)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=4))
def test_a_pattern_that_may_repeat_an_element_is_noticed(dims: list[tuple[int, int]]) -> None:
    shape, strides = tuple(d[0] for d in dims), tuple(d[1] for d in dims)
    addresses = np.zeros(1, np.int64)
    for size, stride in dims:
        addresses = (addresses[:, None] + np.arange(size) * stride).reshape(-1)
    if len(set(addresses.tolist())) < addresses.size:
        assert geometry.repeats(shape, strides)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=4))
def test_merging_dimensions_keeps_the_order_of_addresses(dims: list[tuple[int, int]]) -> None:
    def addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
        result = np.zeros(1, np.int64)
        for size, stride in zip(shape, strides, strict=True):
            result = (result[:, None] + np.arange(size) * stride).reshape(-1)
        return result.tolist()

    shape, strides = tuple(d[0] for d in dims), tuple(d[1] for d in dims)
    merged = geometry.merged(shape, strides)
    assert addresses(*merged) == addresses(shape, strides)
    assert len(merged[0]) <= len(shape)

"""Which bytes a view covers, against the answer that torch itself gives: write through the view and look."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_prep.runtime.rescaling import byte_access
from deepinfer_prep.runtime.rescaling.byte_spans import Spans, sharing, spans_of, union

SIZE = 96


@st.composite
def views(draw: st.DrawFn, storage: torch.Tensor) -> torch.Tensor:
    """Any view that as_strided can make: overlapping windows, expanded, transposed and empty ones included."""
    item = storage.element_size()
    sizes, strides, reach = [], [], SIZE // item - 1
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(0, 7))
        size = draw(st.integers(0, min(4, reach // stride + 1) if stride else 4))
        reach -= max(0, size - 1) * stride
        sizes.append(size)
        strides.append(stride)
    return storage.as_strided(sizes, strides, draw(st.integers(0, reach)))


def covered(view: torch.Tensor, storage: torch.Tensor) -> set[int]:
    """Offsets of the bytes that change when every element of `view` is overwritten."""
    storage.view(torch.uint8).zero_()
    for index in np.ndindex(*view.shape):
        view[index] = -1
    return set(storage.view(torch.uint8).nonzero().flatten().tolist())


def offsets(spans: Spans, storage: torch.Tensor) -> set[int]:
    return {
        byte - storage.data_ptr()
        for start, stop in zip(spans.starts, spans.stops, strict=True)
        for byte in range(start, stop)
    }


@given(st.data(), st.sampled_from([torch.uint8, torch.int16, torch.int32]))
def test_spans_of_any_view(data, dtype):
    storage = torch.zeros(SIZE, dtype=torch.uint8).view(dtype)
    view = data.draw(views(storage))
    spans = spans_of(view)
    assert offsets(spans, storage) == covered(view, storage)
    assert spans.nbytes == len(covered(view, storage))
    assert (spans.starts[1:] > spans.stops[:-1]).all()


@given(st.data())
def test_union_and_sharing(data):
    storages = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    chosen = data.draw(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=5))
    parts = [data.draw(views(storages[index])) for index in chosen]
    bytes_of = [
        {(which, byte) for byte in covered(part, storages[which])} for which, part in zip(chosen, parts, strict=True)
    ]
    spans = [spans_of(part) for part in parts]
    merged = union(spans)
    assert sum(part.nbytes for part in merged) == len(set().union(*bytes_of))
    # Sets that share bytes are tied; ties may run through a third.
    tied = [set(group) for group in sharing(spans)]
    for first in range(len(parts)):
        for second in range(first):
            if bytes_of[first] & bytes_of[second]:
                assert any({first, second} <= group for group in tied)
    for group in tied:
        for member in group:
            assert any(bytes_of[member] & bytes_of[other] for other in group if other != member)


def test_transposed_and_expanded_tensors_are_one_run():
    weight = torch.zeros(8, 16, dtype=torch.uint8)
    for view in (
        weight,
        weight.t(),
        weight.unsqueeze(0).expand(3, 8, 16),
        weight.reshape(2, 4, 4, 4).permute(3, 1, 0, 2),
    ):
        assert spans_of(view).identity == spans_of(weight).identity


def test_separate_storages_over_the_same_memory_meet():
    array = np.zeros(64, dtype=np.uint8)
    first, second = torch.from_numpy(array[:40]), torch.from_numpy(array[24:])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert sharing([spans_of(first), spans_of(second)]) == [[0, 1]]
    assert sharing([spans_of(torch.from_numpy(array[:32])), spans_of(torch.from_numpy(array[32:]))]) == []


@given(st.data())
def test_pieces_hold_every_byte_once_and_write_it_back(data):
    storage = torch.arange(SIZE, dtype=torch.uint8)
    view = data.draw(views(storage))
    expected = storage.clone()
    inside = sorted(covered(view, storage))
    expected[inside] += 100
    storage.copy_(torch.arange(SIZE, dtype=torch.uint8))
    for piece in byte_access.pieces(spans_of(view)):
        piece.codes[:] = piece.codes + 100
        piece.write_back()
    assert torch.equal(storage, expected)


def test_long_runs_come_in_bounded_pieces_that_cover_them(monkeypatch):
    monkeypatch.setattr(byte_access, "PIECE_BYTES", 4096)
    storage = torch.zeros(3, 10_000, dtype=torch.uint8)
    view = storage[:, :9_000]
    sizes = []
    for piece in byte_access.pieces(spans_of(view)):
        sizes.append(piece.codes.size)
        piece.codes[:] += 1
        piece.write_back()
    assert max(sizes) <= 4096
    assert sum(sizes) == 27_000
    assert (view == 1).all()
    assert (storage[:, 9_000:] == 0).all()


def test_memory_of_other_devices_is_staged_through_the_host():
    """The same class serves any device; on this one its copies can be looked at."""
    storage = torch.arange(64, dtype=torch.uint8)
    staged = byte_access.StagedMemory(storage[10:])
    run, gathered = staged.piece(8, 16), staged.gathered(np.array([0, 1, 40]))
    assert run.codes.tolist() == list(range(8, 16))
    assert gathered.codes.tolist() == [0, 1, 40]
    run.codes[:] += 100
    gathered.codes[:] += 100
    assert storage.tolist() == list(range(64))
    run.write_back()
    gathered.write_back()
    changed = {*range(8, 16), 0, 1, 40}
    assert storage.tolist() == [byte + 100 if byte in changed else byte for byte in range(64)]

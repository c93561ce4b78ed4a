"""Halving in memory: each byte once, in every way in which weights and scales can share it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepinfer_prep.runtime.fp8 import rescale_fp8_weights
from deepinfer_prep.runtime.rescaling import byte_access, byte_spans
from tests.runtime.models import (
    assert_halved_once,
    codes_of,
    e8m0,
    every_code,
    fp8,
    frozen,
    halved,
    layer,
    random_codes,
)


def test_slices_of_one_storage():
    flat = fp8(random_codes(4 * 64 * 64))
    flat.view(torch.uint8)[:: 64 * 64] = 0x7E
    before = codes_of(flat)
    model = nn.ModuleList(layer(flat[start : start + 4096].view(64, 64)) for start in range(0, 16384, 4096))
    assert rescale_fp8_weights(model) == 4
    assert_halved_once(before, flat)


def test_column_slices_of_one_storage():
    fused = fp8(random_codes(64, 192))
    fused.view(torch.uint8)[:, ::64] = 0x7E
    before = codes_of(fused)
    model = nn.ModuleList(layer(part) for part in fused.split(64, dim=1))
    assert rescale_fp8_weights(model) == 3
    assert_halved_once(before, fused)


def test_overlapping_views_are_halved_once():
    flat = every_code(1, 160).flatten()
    before = codes_of(flat)
    model = nn.ModuleList([layer(flat[:96], e8m0(3)), layer(flat[64:], e8m0(3)), layer(flat[::2], e8m0(3))])
    assert rescale_fp8_weights(model) == 3
    assert_halved_once(before, flat)


def test_bytes_between_the_rows_of_a_weight_stay():
    packed = random_codes(64, 80)
    packed[:, :64] |= 0x78
    before = packed.clone()
    model = layer(fp8(packed)[:, :64])
    assert rescale_fp8_weights(model) == 1
    assert torch.equal(packed[:, 64:], before[:, 64:])
    assert torch.equal(codes_of(fp8(packed)[:, :64].contiguous()), halved(before[:, :64].contiguous()))


def test_tied_weight_under_two_names():
    model = nn.ModuleDict({"embed": layer(), "head": layer()})
    model["head"].weight = model["embed"].weight
    before = codes_of(model["embed"].weight)
    assert rescale_fp8_weights(model) == 1
    assert_halved_once(before, model["head"].weight)
    assert torch.equal(codes_of(model["embed"].weight.sf), codes_of(e8m0(2, 2, value=128)))


def test_tied_weights_with_separate_scales_double_both():
    model = nn.ModuleDict({"embed": layer(), "head": layer()})
    model["head"].weight = frozen(model["embed"].weight.data)
    model["head"].weight.sf = torch.tensor(0.25)
    before = codes_of(model["embed"].weight)
    assert rescale_fp8_weights(model) == 1
    assert_halved_once(before, model["head"].weight)
    assert torch.equal(codes_of(model["embed"].weight.sf), codes_of(e8m0(2, 2, value=128)))
    assert model["head"].weight.sf.item() == 0.5


def test_transposed_alias_is_the_same_weight():
    weight = every_code()
    model = nn.ModuleList([layer(weight), layer(weight.t())])
    before = codes_of(weight)
    assert rescale_fp8_weights(model) == 1
    assert_halved_once(before, weight)


def test_three_weights_sharing_one_scale_double_it_once():
    scale = torch.tensor([0.5])
    model = nn.ModuleList(layer(every_code(), scale) for _ in range(3))
    assert rescale_fp8_weights(model) == 3
    assert scale.item() == 1.0


def test_weight_within_range_follows_a_weight_that_shares_its_scale():
    scale = torch.tensor([0.5])
    model = nn.ModuleList(
        [layer(fp8(torch.full((64, 64), 0x38, dtype=torch.uint8)), scale), layer(every_code(), scale)]
    )
    assert rescale_fp8_weights(model) == 2
    assert (codes_of(model[0].weight) == 0x30).all()
    assert scale.item() == 1.0


def test_scales_that_are_slices_of_one_storage():
    scale = torch.full((3, 2, 2), 0.5)
    model = nn.ModuleList([layer(scale=scale[0]), layer(scale=scale[1])])
    assert rescale_fp8_weights(model) == 2
    assert scale[:2].eq(1.0).all()
    assert scale[2].eq(0.5).all()


def test_weight_within_range_follows_when_its_scale_overlaps_another():
    scale = torch.full((3,), 0.5)
    small = fp8(torch.full((64, 64), 0x38, dtype=torch.uint8))
    model = nn.ModuleList([layer(small, scale[:2]), layer(every_code(), scale[1:])])
    assert rescale_fp8_weights(model) == 2
    assert (codes_of(model[0].weight) == 0x30).all()
    assert scale.eq(1.0).all()


def test_mapped_file_read_as_separate_storages(tmp_path):
    codes = random_codes(8192)
    codes[::64] = 0x7E
    path = tmp_path / "shard"
    path.write_bytes(codes.numpy().tobytes())
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    model = nn.ModuleList(
        layer(fp8(torch.from_numpy(mapped[start : start + 4096])).view(64, 64)) for start in (0, 4096)
    )
    assert rescale_fp8_weights(model) == 2
    assert torch.equal(torch.from_numpy(np.array(mapped)), halved(codes))


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:, ::2], lambda w: w[8:56, 16:48], lambda w: w[::3]])
def test_strided_weights_keep_their_strides(view):
    base = every_code()
    weight = view(base)
    inside = torch.zeros(64, 64, dtype=torch.bool)
    view(inside).fill_(True)
    before = codes_of(base)
    model = layer(weight)
    assert rescale_fp8_weights(model) == 1
    assert model.weight.stride() == weight.stride()
    assert torch.equal(codes_of(base), torch.where(inside, halved(before), before))


# Any layout


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Views of one storage of 64 bytes: start, length, step."""
    views = []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, 63))
        step = draw(st.sampled_from([1, 1, 2, 3]))
        views.append((start, draw(st.integers(1, (63 - start) // step + 1)), step))
    return views


@given(layouts(), st.lists(st.integers(0, 3), min_size=5, max_size=5), st.binary(min_size=64, max_size=64))
def test_any_layout_changes_whole_families_once(views, scale_of, content):
    codes = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    flat, scales = fp8(codes.clone()), [torch.tensor([2.0**exponent]) for exponent in range(4)]
    model = nn.ModuleList(
        layer(flat.as_strided([length], [step], start), scales[which])
        for (start, length, step), which in zip(views, scale_of, strict=False)
    )
    places = [set(range(start, start + length * step, step)) for start, length, step in views]
    changing = {i for i, place in enumerate(places) if any((int(codes[p]) & 0x7F) in range(0x78, 0x7F) for p in place)}
    while True:
        more = {i for i in range(len(views)) for j in changing if places[i] & places[j] or scale_of[i] == scale_of[j]}
        if more <= changing:
            break
        changing |= more
    rescale_fp8_weights(model)
    touched = torch.zeros(64, dtype=torch.bool)
    touched[sorted(set().union(*(places[i] for i in changing)))] = True
    nan = (codes & 0x7F) == 0x7F
    assert torch.equal(codes_of(flat), torch.where(touched & ~nan, halved(codes), codes))
    for index, scale in enumerate(scales):
        assert scale.item() == 2.0 ** (index + (index in {scale_of[i] for i in changing}))
    assert rescale_fp8_weights(model) == 0


def test_other_devices_take_the_staged_way(monkeypatch):
    """Every storage as a space of its own, reached through host copies, as on a device."""
    monkeypatch.setattr(byte_access, "_HostMemory", lambda part: byte_access.StagedMemory(part.anchor))
    monkeypatch.setattr(
        byte_spans, "_place", lambda t: (t.untyped_storage()._cdata, int(t.storage_offset()) * t.element_size())
    )
    flat = fp8(random_codes(3, 64, 100))
    flat.view(torch.uint8)[:, 0, 0] = 0x7E
    scale = torch.full((3, 2, 2), 0.5)
    before = codes_of(flat)
    model = nn.ModuleList(layer(flat[i][:, :64], scale[i]) for i in range(3))
    assert rescale_fp8_weights(model) == 3
    assert torch.equal(codes_of(flat[..., :64].contiguous()), halved(before[..., :64].contiguous()))
    assert torch.equal(codes_of(flat[..., 64:].contiguous()), before[..., 64:])
    assert scale.eq(1.0).all()


def test_memory_stays_bounded():
    model = layer(fp8(torch.full((8192, 8192), 0x7E, dtype=torch.uint8)), e8m0(256, 256))
    tracemalloc.start()
    rescale_fp8_weights(model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 1024 * 1024
    assert (codes_of(model.weight) == 0x76).all()

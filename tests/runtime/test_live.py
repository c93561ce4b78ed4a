"""Halving in memory: every way in which weights and scales of a live model can lie."""

from __future__ import annotations

import copy
import io
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.runtime import gemm, mappings, memory, spans
from deepinfer_prep.runtime.fp8 import halve_e4m3fn_bytes, rescale_fp8_weights

from .models import (
    FN_CODES,
    ROUNDED_CODES,
    Layer,
    codes_of,
    e8m0,
    every_code,
    fp8,
    frozen,
    halved,
    random_codes,
)


def layer(weight: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> Layer:
    """A layer whose weight holds every code, with V4.1's 32x32 e8m0 scale unless another is given."""
    made = Layer(every_code() if weight is None else weight)
    made.weight.sf = e8m0(2, 2) if scale is None else scale
    return made


def assert_halved_once(before: torch.Tensor, weight: torch.Tensor) -> None:
    assert torch.equal(codes_of(weight), halved(before))
    assert ((codes_of(weight) & 0x7F) <= 0x76).logical_or((codes_of(weight) & 0x7F) == 0x7F).all()


def refusal(model: nn.Module) -> str:
    """The message of a refusal, after which every tensor of the model is as it was."""
    held = [*model.parameters(), *model.buffers()]
    held += [tensor.sf for tensor in held if hasattr(tensor, "sf")]
    before = [codes_of(tensor.contiguous()) for tensor in held]
    with pytest.raises(RefusedError) as caught:
        rescale_fp8_weights(model)
    assert all(torch.equal(codes, codes_of(tensor.contiguous())) for codes, tensor in zip(before, held, strict=True))
    assert caught.value.reasons[-1] == "Nothing was changed."
    return str(caught.value)


# What halving and doubling mean


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_halve_e4m3fn_bytes_equals_the_cast_of_half_the_value(dtype):
    result = halve_e4m3fn_bytes(FN_CODES.view(dtype))
    assert result.dtype == dtype
    numbers = fp8(FN_CODES).float()
    assert torch.equal(codes_of(result)[~numbers.isnan()], halved(FN_CODES)[~numbers.isnan()])
    assert codes_of(result)[[0x00, 0x80, 0x7F, 0xFF]].tolist() == [0x00, 0x80, 0x7F, 0xFF]


def test_halve_e4m3fn_bytes_takes_arrays_bytes_and_strided_tensors():
    array = FN_CODES.numpy().reshape(16, 16)
    expected = halve_e4m3fn_bytes(FN_CODES).numpy()
    assert np.array_equal(halve_e4m3fn_bytes(array.T), expected.reshape(16, 16).T)
    assert halve_e4m3fn_bytes(array.tobytes()) == expected.tobytes()
    assert np.array_equal(halve_e4m3fn_bytes(FN_CODES.view(16, 16).t()).numpy(), expected.reshape(16, 16).T)
    for wrong in (torch.zeros(2, dtype=torch.int16), np.zeros(2, dtype=np.int8)):
        with pytest.raises(TypeError, match="expected uint8"):
            halve_e4m3fn_bytes(wrong)


def test_product_is_kept_but_for_the_sixteen_lowest_odd_codes():
    model = layer(fp8(FN_CODES.clone().view(16, 16)), torch.tensor(0.5))
    before = model.weight.double() * model.weight.sf.double()
    assert rescale_fp8_weights(model) == 1
    after = model.weight.double() * model.weight.sf.double()
    rounded = torch.isin(FN_CODES, ROUNDED_CODES).view(16, 16)
    assert torch.equal(after[~rounded].nan_to_num(nan=1e9), before[~rounded].nan_to_num(nan=1e9))
    assert (after - before)[rounded].abs().max() == 2.0**-9 * 0.5


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor([[1.0, 0.3], [3e-39, 1.5e38]]),
        torch.tensor([[1.0, 0.3]], dtype=torch.float64),
        torch.tensor([0.5, 3e-5, 32752.0]).half(),
        torch.tensor([0.5, 1e-40, 1.6e38]).bfloat16(),
    ],
)
def test_float_scales_double_exactly(scale):
    model = layer(scale=scale.clone())
    assert rescale_fp8_weights(model) == 1
    assert model.weight.sf.dtype == scale.dtype
    assert torch.equal(model.weight.sf.double(), scale.double() * 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_every_e8m0_byte_that_has_a_double(dtype):
    model = layer(scale=torch.arange(254, dtype=torch.uint8).view(dtype))
    assert rescale_fp8_weights(model) == 1
    assert codes_of(model.weight.sf).tolist() == list(range(1, 255))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_packed_scales_are_doubled_byte_by_byte(dtype):
    codes = random_codes(64, 8) & 0x7F
    model = layer(scale=codes.clone().view(dtype))
    assert rescale_fp8_weights(model) == 1
    assert torch.equal(model.weight.sf.view(torch.uint8), codes + 1)


def test_column_major_packed_scales_keep_strides_and_padding():
    # DeepGEMM's layout: int32 words, column-major, rows padded for alignment.
    storage = torch.full((4, 80), 0x7F7F7F7F, dtype=torch.int32)
    scale = storage.t()[:64]
    model = layer(scale=scale)
    assert rescale_fp8_weights(model) == 1
    assert scale.stride() == (1, 80)
    assert (scale == torch.tensor(0x80808080 - 2**32, dtype=torch.int32)).all()
    assert (storage[:, 64:] == 0x7F7F7F7F).all()


def test_expanded_scale_is_doubled_once():
    model = layer(scale=torch.tensor([[0.5]]).expand(2, 2))
    assert rescale_fp8_weights(model) == 1
    assert torch.equal(model.weight.sf, torch.ones(2, 2))


# Memory that is shared


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


# Where weights and scales are found


@pytest.mark.parametrize(
    ("weight_name", "scale_name"),
    [
        ("weight", "weight_scale_inv"),
        ("weight", "weight_scale"),
        ("weight", "scale"),
        ("w13_weight", "w13_weight_scale_inv"),
        ("gate_up_proj", "gate_up_proj_scale_inv"),
    ],
)
@pytest.mark.parametrize("place", ["parameter", "buffer", "attribute"])
def test_scale_beside_the_weight(weight_name, scale_name, place):
    model = nn.Module()
    model.register_parameter(weight_name, frozen(every_code()))
    scale = torch.full((2, 2), 0.5)
    if place == "parameter":
        model.register_parameter(scale_name, frozen(scale))
    elif place == "buffer":
        model.register_buffer(scale_name, scale)
    else:
        setattr(model, scale_name, scale)
    assert rescale_fp8_weights(model) == 1
    assert getattr(model, scale_name).eq(1.0).all()


def test_plain_scale_of_something_else_stays():
    model = layer()
    model.scale = torch.tensor(0.125)
    assert rescale_fp8_weights(model) == 1
    assert model.scale.item() == 0.125


def test_input_scale_stays():
    model = layer()
    model.register_buffer("input_scale", torch.tensor(0.125))
    assert rescale_fp8_weights(model) == 1
    assert model.input_scale.item() == 0.125


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_are_weights_too(persistent):
    model = nn.Module()
    model.register_buffer("weight", every_code(), persistent=persistent)
    model.register_buffer("weight_scale", torch.tensor(0.5))
    before = codes_of(model.weight)
    assert rescale_fp8_weights(model) == 1
    assert_halved_once(before, model.weight)


def test_kv_cache_is_no_weight():
    model = layer()
    model.register_buffer("kv", every_code(), persistent=False)
    before = codes_of(model.kv)
    assert rescale_fp8_weights(model) == 1
    assert torch.equal(codes_of(model.kv), before)


def test_other_tensors_stay():
    model = layer()
    model.experts = frozen(random_codes(64, 32).view(torch.int8))
    model.experts.sf = e8m0(64, 2)
    model.norm = frozen(torch.ones(8, dtype=torch.bfloat16))
    model.kv = frozen(random_codes(8).view(torch.float8_e5m2))
    before = [codes_of(t.data) for t in (model.experts, model.experts.sf, model.norm, model.kv)]
    assert rescale_fp8_weights(model) == 1
    after = [codes_of(t.data) for t in (model.experts, model.experts.sf, model.norm, model.kv)]
    assert all(torch.equal(first, second) for first, second in zip(before, after, strict=True))


def test_stray_scale_without_fp8_weight_stays():
    model = nn.Module()
    model.register_parameter("weight", frozen(torch.ones(4, 4, dtype=torch.bfloat16)))
    model.register_buffer("weight_scale", torch.tensor(0.5))
    assert rescale_fp8_weights(model) == 0
    assert model.weight_scale.item() == 0.5


def test_expert_stack_with_its_own_scales():
    model = layer(fp8(random_codes(3, 64, 64)), torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1))
    assert rescale_fp8_weights(model) == 1
    assert model.weight.sf.flatten().tolist() == [2.0, 4.0, 8.0]


def test_empty_weight():
    model = layer(fp8(torch.empty(0, 64, dtype=torch.uint8)), e8m0(0, 2))
    assert rescale_fp8_weights(model) == 0


# Only what has to change changes


@pytest.mark.parametrize("highest", [0x76, 0x77])
def test_weight_within_the_hardware_range_stays_exact(highest):
    model = layer(fp8(random_codes(64, 64, highest=highest)))
    model.weight.data.view(torch.uint8)[0, 0] = highest
    before, scale = codes_of(model.weight), codes_of(model.weight.sf)
    assert rescale_fp8_weights(model) == 0
    assert torch.equal(codes_of(model.weight), before)
    assert torch.equal(codes_of(model.weight.sf), scale)


@pytest.mark.parametrize("code", [0x78, 0x7E, 0xF8, 0xFE])
def test_a_single_misread_code_is_found(code):
    codes = torch.zeros(1000, 77, dtype=torch.uint8)
    codes[-1, -1] = code
    model = layer(fp8(codes.clone()))
    assert rescale_fp8_weights(model) == 1
    assert codes_of(model.weight)[-1, -1] == code - 8


@pytest.mark.parametrize(
    ("name", "value"), [("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3"), ("DEEPINFER_NEURON_FP8_MAX", "448")]
)
def test_nothing_where_e4m3fn_stays(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    model = layer()
    before = codes_of(model.weight)
    assert rescale_fp8_weights(model) == 0
    assert torch.equal(codes_of(model.weight), before)


def test_second_call_does_nothing():
    model = layer()
    rescale_fp8_weights(model)
    before, scale = codes_of(model.weight), codes_of(model.weight.sf)
    assert rescale_fp8_weights(model) == 0
    assert torch.equal(codes_of(model.weight), before)
    assert torch.equal(codes_of(model.weight.sf), scale)


def test_second_call_after_save_load_copy_and_wrapping():
    model = nn.Module()
    model.register_parameter("weight", frozen(every_code()))
    model.register_buffer("weight_scale", torch.full((2, 2), 0.5))
    before = codes_of(model.weight)
    rescale_fp8_weights(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(torch.load(file))
    for again in (loaded, copy.deepcopy(model), nn.Sequential(model), pickled(model)):
        assert rescale_fp8_weights(again) == 0
        assert_halved_once(before, next(again.parameters()))
        assert next(again.buffers()).eq(1.0).all()


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_part_first_then_the_whole():
    model = nn.ModuleList([layer(), layer()])
    before = codes_of(model[0].weight)
    assert rescale_fp8_weights(model[0]) == 1
    assert rescale_fp8_weights(model) == 1
    for part in model:
        assert_halved_once(before, part.weight)
        assert (codes_of(part.weight.sf) == 128).all()


def test_weights_loaded_anew_are_halved_anew():
    model = layer()
    before = codes_of(model.weight)
    rescale_fp8_weights(model)
    # The way of vLLM's loaders, which leaves no trace on the parameter.
    model.weight.data.copy_(fp8(before))
    model.weight.sf.copy_(e8m0(2, 2))
    assert rescale_fp8_weights(model) == 1
    assert_halved_once(before, model.weight)
    assert (codes_of(model.weight.sf) == 128).all()


def test_kernel_scale_attached_before_follows():
    model = layer(every_code(64, 128), torch.full((1, 1), 0.5))
    model.weight._nki_scale = torch.full((2, 4), 126, dtype=torch.uint8)
    assert rescale_fp8_weights(model) == 1
    assert (model.weight._nki_scale == 127).all()
    assert gemm.prepare_model(model) == 1
    assert (model.weight._nki_scale == 127).all()


# Refusals: everything wrong at once, nothing changed


def test_weights_without_scale_are_all_named():
    model = nn.ModuleDict({"a": Layer(every_code()), "b": layer(), "c": Layer(every_code().t())})
    message = refusal(model)
    assert "a.weight: float8_e4m3fn without a scale" in message
    assert "c.weight: float8_e4m3fn without a scale" in message
    assert "b.weight" not in message


def test_copy_that_lost_its_scales_is_named():
    assert "weight: float8_e4m3fn without a scale" in refusal(copy.deepcopy(layer()))


def test_persistent_buffer_without_scale_is_named():
    model = nn.Module()
    model.register_buffer("table", every_code())
    assert "table: float8_e4m3fn without a scale" in refusal(model)


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (
            torch.tensor([127, 254], dtype=torch.uint8),
            r"an element is the e8m0 byte 254 \(2\^127\), which has no double",
        ),
        (torch.tensor([127, 255], dtype=torch.uint8), r"an element is the e8m0 byte 255 \(NaN\)"),
        (torch.tensor([0x7FFE7F7F], dtype=torch.int32), "e8m0 byte 254"),
        (torch.tensor([1.0, 40000.0]).half(), "an element is 40000.*no finite F16 double"),
        (torch.tensor([1.0, 2e38]), r"an element is .*e\+38.*no finite F32 double"),
        (torch.tensor([1.0, 3e38]).bfloat16(), "no finite BF16 double"),
        (torch.tensor([1.0, torch.finfo(torch.float32).min]), "no finite F32 double"),
        (torch.tensor([1.0, torch.nan]), "an element is nan"),
        (torch.zeros(2, 2), "holds only zeros, but broken.weight does not: the scale was never loaded"),
        (every_code(2, 2), r"a scale of dtype torch\.float8_e4m3fn, which is no known form"),
        (torch.ones(2, 2, dtype=torch.int64), r"a scale of dtype torch\.int64"),
        (torch.ones(2, 2, device="meta"), "is on the meta device"),
    ],
)
def test_unusable_scales_are_refused_before_any_change(scale, reason):
    intact, broken = layer(), layer(scale=scale)
    model = nn.ModuleDict({"intact": intact, "broken": broken})
    before = codes_of(intact.weight), codes_of(broken.weight)
    with pytest.raises(RefusedError, match=reason) as caught:
        rescale_fp8_weights(model)
    assert "broken.weight.sf" in str(caught.value)
    assert "intact" not in str(caught.value)
    assert torch.equal(codes_of(intact.weight), before[0])
    assert torch.equal(codes_of(broken.weight), before[1])
    assert (codes_of(intact.weight.sf) == 127).all()


@pytest.mark.parametrize("scale", [torch.tensor([torch.nan]), torch.tensor([255], dtype=torch.uint8)])
def test_nan_scale_of_a_weight_that_would_stay_is_refused(scale):
    model = layer(fp8(torch.full((64, 64), 0x38, dtype=torch.uint8)), scale)
    assert "NaN" in refusal(model)


@pytest.mark.parametrize("scale", [torch.tensor([40000.0]).half(), torch.tensor([254], dtype=torch.uint8)])
def test_large_scale_of_a_weight_that_stays_is_fine(scale):
    model = layer(fp8(torch.full((64, 64), 0x38, dtype=torch.uint8)), scale)
    assert rescale_fp8_weights(model) == 0


def test_zero_scale_of_zero_weights_is_fine():
    model = layer(fp8(torch.tensor([[0x00, 0x80]], dtype=torch.uint8)), torch.zeros(1))
    assert rescale_fp8_weights(model) == 0


def test_fp8_scales_are_not_halved_as_weights():
    model = nn.Module()
    model.register_parameter("weight", frozen(random_codes(64, 32)))
    model.register_parameter("weight_scale", frozen(every_code(64, 4)))
    assert "weight_scale: float8_e4m3fn is used as a scale here (NVFP4)" in refusal(model)


def test_scale_that_another_format_needs_unchanged():
    scale = e8m0(64, 2)
    model = nn.ModuleDict({"fp8": layer(scale=scale), "fp4": Layer(random_codes(64, 32).view(torch.int8))})
    model["fp4"].weight.sf = scale
    message = refusal(model)
    assert "a scale of E8M0 (fp8.weight.sf) and the scale of a weight that is not halved (fp4.weight.sf)" in message


def test_scale_inside_a_weight():
    storage = torch.full((68,), 0x7E, dtype=torch.uint8)
    model = layer(fp8(storage)[:64].view(8, 8), storage[60:64])
    assert "The same bytes are an fp8 weight (weight) and a scale of E8M0 (weight.sf)." in refusal(model)


def test_scales_of_two_kinds_over_the_same_bytes():
    scale = torch.full((2, 2), 0.5)
    model = nn.ModuleList([layer(scale=scale), layer(scale=scale.view(torch.int32))])
    assert "a scale of F32 (0.weight.sf) and a scale of E8M0 (1.weight.sf)" in refusal(model)


def test_weights_on_meta_are_named():
    model = layer()
    model.weight = frozen(torch.empty(64, 64, dtype=torch.float8_e4m3fn, device="meta"))
    model.weight.sf = e8m0(2, 2)
    with pytest.raises(RefusedError, match=r"weight: is on the meta device\. Load the weights"):
        rescale_fp8_weights(model)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("r", "lies in memory that is mapped read-only"), ("r+", "changing it would change that file")],
)
def test_mapped_files_are_not_written_to(tmp_path, mode, reason):
    path = tmp_path / "shard"
    path.write_bytes(bytes([0x7E]) * 8192)
    mapped = np.memmap(path, dtype=np.uint8, mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = fp8(torch.from_numpy(mapped[4096:])).view(64, 64)
    model = nn.ModuleDict({"copied": layer(), "mapped": layer(weight)})
    message = refusal(model)
    assert f"mapped.weight: {'is a shared mapping of' if mode == 'r+' else reason}" in message
    assert reason in message
    assert str(path) in message
    assert path.read_bytes() == bytes([0x7E]) * 8192


def test_memory_shared_between_processes_is_fine():
    model = layer()
    model.weight.data.share_memory_()
    before = codes_of(model.weight)
    assert rescale_fp8_weights(model) == 1
    assert_halved_once(before, model.weight)


def test_system_without_a_list_of_mappings(monkeypatch, tmp_path):
    monkeypatch.setattr(mappings, "_MAPS", tmp_path / "absent")
    assert rescale_fp8_weights(layer()) == 1


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
    monkeypatch.setattr(memory, "_HostMemory", lambda part: memory.StagedMemory(part.anchor))
    monkeypatch.setattr(
        spans, "_place", lambda t: (t.untyped_storage()._cdata, int(t.storage_offset()) * t.element_size())
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

"""Halving in memory: what it does to numbers, where it finds weights and scales, and what it leaves alone."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from deepinfer_prep.runtime import gemm
from deepinfer_prep.runtime.fp8 import halve_e4m3fn_bytes, rescale_fp8_weights
from tests.runtime.models import (
    FN_CODES,
    ROUNDED_CODES,
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

"""Which kernel scale a weight in memory gets, from every form that its scale may have."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.kernels import reference
from deepinfer_prep.runtime import gemm, rescale_fp8_weights
from tests.runtime.models import Layer, codes_of, e8m0, every_code, fp8, frozen, random_codes

POWERS = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])


def weight_codes(*shape: int) -> torch.Tensor:
    return random_codes(*shape, highest=0x76)


def prepared(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight of a model after prepare_model prepared it."""
    model = Layer(fp8(codes) if codes.dtype == torch.uint8 else codes)
    model.weight.sf = scale
    assert gemm.prepare_model(model) == 1
    assert gemm.has_kernel(model.weight)
    assert model.weight._nki_weight.dtype == torch.uint8
    assert model.weight._nki_weight.shape == codes.shape
    assert model.weight._nki_weight.data_ptr() == model.weight.data_ptr()
    return model.weight


def unprepared(weight: torch.Tensor, scale: torch.Tensor, caplog: pytest.LogCaptureFixture) -> str:
    """The logged reason why a weight cannot be prepared."""
    model = Layer(weight)
    model.weight.sf = scale
    with caplog.at_level(logging.WARNING):
        assert gemm.prepare_model(model) == 0
    assert not gemm.has_kernel(model.weight)
    assert not hasattr(model.weight, "_nki_weight")
    assert "weight among them" in caplog.text
    return caplog.text


def blocks(scale: torch.Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> torch.Tensor:
    """float64 factors of every element, from a scale of blocks."""
    by_row = scale.double()[..., torch.arange(shape[-2]) // rows, :]
    return by_row[..., torch.arange(shape[-1]) // columns]


def from_kernel_scale(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """float64 factors of every element, from a kernel scale of 32x32 blocks."""
    assert scale.dtype == torch.uint8
    assert scale.shape == (*shape[:-2], -(-shape[-2] // 32), -(-shape[-1] // 32))
    return blocks(reference.decode_e8m0_exact(scale), 32, 32, shape)


# e4m3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_kernel_form_is_aliased_and_so_never_stale(dtype):
    scale = random_codes(2, 4).view(dtype)
    weight = prepared(weight_codes(64, 128), scale)
    assert torch.equal(weight._nki_scale, scale.view(torch.uint8))
    assert weight._nki_scale.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize("shape", [(64, 128), (100, 128), (64, 300), (3, 64, 128), (576, 300), (1000, 96), (1, 32)])
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (1, 32), (128, 128), (1, 128), (10_000, 10_000), (1, 10_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_scales_of_every_grid(shape, rows, columns, dtype):
    grid = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    exponents = torch.randint(-4, 4, grid, generator=torch.Generator().manual_seed(0))
    # One scale for every row: alike within each block of 32 rows, as the kernels need it.
    exponents = exponents.index_select(
        -2, torch.arange(grid[-2]) // (32 if rows == 1 else 1) * (32 if rows == 1 else 1)
    )
    values = torch.exp2(exponents.double())
    scale = (exponents + 127).to(dtype) if dtype == torch.uint8 else values.to(dtype)
    weight = prepared(weight_codes(*shape), scale)
    assert torch.equal(from_kernel_scale(weight._nki_scale, shape), blocks(values, rows, columns, shape))


def test_576_by_300_takes_blocks_of_128_and_not_of_a_fifth():
    scale = torch.exp2(torch.arange(15.0)).view(5, 3)
    weight = prepared(weight_codes(576, 300), scale)
    assert weight._nki_scale.shape == (18, 10)
    assert torch.equal(from_kernel_scale(weight._nki_scale, (576, 300)), blocks(scale, 128, 128, (576, 300)))


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.full((96,), 0.5), torch.full((96, 1), 0.5)]
)
def test_tensor_and_channel_scales(scale):
    weight = prepared(weight_codes(96, 64), scale)
    assert (weight._nki_scale == 126).all()
    assert weight._nki_scale.shape == (3, 2)


def test_expert_scales_differ_by_expert():
    for scale in (
        POWERS[:3],
        POWERS[:3].view(3, 1),
        POWERS[:3].view(3, 1, 1),
        POWERS[:3].view(3, 1, 1).expand(3, 1, 2),
    ):
        weight = prepared(weight_codes(3, 96, 256), scale)
        assert weight._nki_scale.shape == (3, 3, 8)
        assert [weight._nki_scale[e].unique().item() for e in range(3)] == [125, 126, 127]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("columns", [32, 96, 128, 160, 512])
def test_packed_row_scales_with_padding(dtype, columns):
    """V4.1's runtime layout, column-major with padded rows, and the last word of a row padded."""
    count = -(-columns // 32)
    word = torch.empty(0, dtype=dtype).element_size()
    codes = torch.zeros(64, -(-count // word) * word, dtype=torch.uint8)
    codes[:, :count] = (random_codes(2, count) & 0x7F).repeat_interleave(32, dim=0)
    words = codes.view(dtype)
    column_major = torch.zeros(words.shape[1], 72, dtype=dtype).t()
    column_major[:64] = words
    for scale in (words, column_major[:64], column_major):
        weight = prepared(weight_codes(64, columns), scale)
        assert torch.equal(weight._nki_scale, codes[::32, :count])


def test_rows_of_a_block_that_disagree(caplog):
    codes = torch.full((64, 4), 127, dtype=torch.uint8)
    codes[33, 2] = 128
    assert "rows that share a block of 32 have different scales" in unprepared(
        fp8(weight_codes(64, 128)), codes, caplog
    )


@pytest.mark.parametrize("value", [0.006975, 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("grid", [(2, 4), (64, 4), (64, 1)])
def test_float_scales_of_small_blocks_that_are_no_powers_of_two(value, grid, caplog):
    message = unprepared(fp8(weight_codes(64, 256)), torch.full(grid, value).repeat_interleave(2, dim=1), caplog)
    assert "not every scale is a positive power of two" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_float_scales_that_are_not_finite(value, caplog):
    message = unprepared(fp8(weight_codes(64, 256)), torch.full((1, 2), value), caplog)
    assert "not every scale is a positive power of two" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ([[0.3, 0.006975], [1.5, 2.0]], [[0.3, 0.006975], [1.5, 2.0]]),
        ([0.3], [[0.3, 0.3], [0.3, 0.3]]),
        (0.3, [[0.3, 0.3], [0.3, 0.3]]),
        ([[0.3, 2.0]], [[0.3, 2.0], [0.3, 2.0]]),
    ],
)
def test_large_block_scales_that_are_no_powers_of_two_have_a_kernel_of_their_own(scale, expected, dtype):
    weight = prepared(weight_codes(200, 256), torch.tensor(scale, dtype=dtype))
    assert weight._nki_block_scale.dtype == torch.float32
    assert torch.equal(weight._nki_block_scale, torch.tensor(expected, dtype=dtype).float())
    assert weight._nki_block_scale.is_contiguous()
    assert not hasattr(weight, "_nki_scale")


def test_preparing_again_follows_the_scale():
    model = Layer(fp8(weight_codes(64, 128)))
    model.weight.sf = torch.full((1, 1), 0.3)
    assert gemm.prepare_model(model) == 1
    model.weight.sf = torch.full((1, 1), 0.5)
    assert gemm.prepare_model(model) == 1
    assert not hasattr(model.weight, "_nki_block_scale")
    assert (model.weight._nki_scale == 126).all()
    model.weight.sf = torch.full((7, 9), 0.5)
    assert gemm.prepare_model(model) == 0
    assert not gemm.has_kernel(model.weight)


@pytest.mark.parametrize("shape", [(3, 5), (216, 4), (64, 5), (2, 2, 4), (63, 4), (256, 4)])
def test_unknown_grids(shape, caplog):
    message = unprepared(fp8(weight_codes(64, 128)), e8m0(*shape), caplog)
    assert (
        f"a scale of {list(shape)} has no known grid" in message or f"a scale of shape {list(shape)} fits no" in message
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64])
def test_unknown_scale_types(dtype, caplog):
    scale = torch.zeros(2, 4, dtype=torch.uint8).to(dtype)
    assert f"{dtype} is no known form of a scale" in unprepared(fp8(weight_codes(64, 128)), scale, caplog)


def test_weights_that_are_not_row_major(caplog):
    square = fp8(weight_codes(64, 64))
    assert "not row-major" in unprepared(square.t(), e8m0(2, 2), caplog)
    assert "not row-major" in unprepared(fp8(weight_codes(64, 128))[:, :64], e8m0(2, 2), caplog)


def test_vectors_and_empty_weights(caplog):
    assert "no matrix or stack of matrices" in unprepared(fp8(weight_codes(64)), torch.tensor(0.5), caplog)
    assert "no matrix or stack of matrices" in unprepared(fp8(weight_codes(0, 64)), e8m0(0, 2), caplog)


def test_weight_on_meta(caplog):
    weight = torch.empty(64, 64, dtype=torch.float8_e4m3fn, device="meta")
    assert "is on the meta device; load it first" in unprepared(weight, e8m0(2, 2), caplog)


def test_weights_that_were_not_rescaled_are_refused():
    model = nn.ModuleDict({"first": Layer(fp8(weight_codes(64, 64))), "second": Layer(every_code())})
    for part in model.values():
        part.weight.sf = torch.ones(1, 1)
    with pytest.raises(
        RefusedError, match=r"1 fp8 weights hold codes above 240, second\.weight among them.*rescale_fp8"
    ):
        gemm.prepare_model(model)
    rescale_fp8_weights(model)
    assert gemm.prepare_model(model) == 2
    assert (model["first"].weight._nki_scale == 127).all()
    assert (model["second"].weight._nki_scale == 128).all()


def test_code_240_is_within_range():
    prepared(torch.full((64, 64), 0x77, dtype=torch.uint8), e8m0(2, 2))


def test_where_e4m3fn_stays(monkeypatch, caplog):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert "on trn3 weights keep e4m3fn codes above" in unprepared(every_code(), e8m0(2, 2), caplog)
    prepared(weight_codes(64, 64), e8m0(2, 2))
    monkeypatch.setenv("DEEPINFER_NEURON_FP8_MAX", "448")
    model = Layer(fp8(weight_codes(64, 64)))
    model.weight.sf = e8m0(2, 2)
    assert gemm.prepare_model(model) == 0
    assert not gemm.has_kernel(model.weight)


# fp4


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_fp4_scales_are_taken_as_they_are(lead, dtype):
    scale = random_codes(*lead, 96, 4).view(dtype)
    weight = prepared(random_codes(*lead, 96, 64).view(torch.int8), scale)
    assert torch.equal(weight._nki_scale, scale.view(torch.uint8))
    assert weight._nki_scale.data_ptr() == scale.data_ptr()


def test_fp4_type_of_torch():
    prepared(random_codes(96, 64).view(torch.float4_e2m1fn_x2), e8m0(96, 4))


def test_fp4_scales_packed_and_padded():
    codes = random_codes(128, 4)
    for scale in (codes, codes.view(torch.int32), codes.view(torch.int32).t().contiguous().t()):
        weight = prepared(random_codes(100, 64).view(torch.int8), scale)
        assert torch.equal(weight._nki_scale, codes[:100])


@pytest.mark.parametrize("scale", [e8m0(95, 4), e8m0(96, 2), e8m0(3, 4), e8m0(1)])
def test_fp4_scales_of_another_shape(scale, caplog):
    unprepared(random_codes(96, 64).view(torch.int8), scale, caplog)


@pytest.mark.parametrize("scale", [torch.ones(96, 1), torch.ones(96, 4), torch.ones(1)])
def test_int8_weights_are_no_fp4(scale, caplog):
    message = unprepared(random_codes(96, 64).view(torch.int8), scale, caplog)
    assert "int8 with scales of torch.float32 is no fp4 weight" in message


# Models


def test_count_and_names(caplog):
    model = nn.Module()
    model.first = Layer(fp8(weight_codes(64, 64)))
    model.first.register_buffer("weight_scale_inv", torch.ones(1, 1))
    model.tied = model.first
    model.register_buffer("table", fp8(weight_codes(64, 64)))
    model.table_scale = torch.ones(1)
    model.norm = frozen(torch.ones(4))
    model.int8_without_scale = frozen(torch.ones(4, 4, dtype=torch.int8))
    assert gemm.prepare_model(model) == 2
    assert not caplog.records


def test_weight_that_came_prepared_counts():
    model = Layer(fp8(weight_codes(64, 64)))
    scale = torch.full((2, 2), 127, dtype=torch.uint8)
    model.weight._nki_weight, model.weight._nki_scale = model.weight.data.view(torch.uint8), scale
    assert gemm.prepare_model(model) == 1
    assert model.weight._nki_scale is scale


def test_a_long_list_of_reasons_is_one_line_each(caplog):
    model = nn.ModuleList(Layer(fp8(weight_codes(64, 64))) for _ in range(5))
    for index, part in enumerate(model):
        part.weight.sf = torch.full((1, 1), 0.5) if index == 4 else torch.full((2, 2), 0.3)
    assert gemm.prepare_model(model) == 1
    assert len(caplog.records) == 1
    assert "no kernel for 4 weights, 0.weight among them: not every scale" in caplog.text


def test_codes_stay():
    codes = weight_codes(64, 64)
    assert torch.equal(codes_of(prepared(codes.clone(), torch.ones(1))), codes)

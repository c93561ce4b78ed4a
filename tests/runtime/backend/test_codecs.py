"""The codecs: exact on every code, rounded and saturated by definition, and cheap."""

from __future__ import annotations

import math
import os

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from deepinfer_prep.runtime.backend import codec_operations, codecs, encoded_numbers
from deepinfer_prep.runtime.backend.byte_formats import E4M3FN, E8M0, ByteFormat
from tests.runtime.backend.harness import E8, F8, SATURATES, all_codes, bits

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
CODES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.float8_e5m2])
def test_e4m3fn_decodes_as_torch_casts(dtype: torch.dtype) -> None:
    assert torch.equal(bits(codecs.decode_e4m3fn(CODES, dtype)), bits(all_codes().to(dtype)))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_e4m3fn_decodes_to_integers_as_torch_casts(dtype: torch.dtype) -> None:
    # The integer of a NaN, and of a negative value for uint8, is undefined in C++.
    defined = ~all_codes().float().isnan() & ((CODES < 128) | torch.tensor(dtype != torch.uint8))
    assert torch.equal(codecs.decode_e4m3fn(CODES, dtype)[defined], all_codes().to(dtype)[defined])


def test_e4m3fn_decodes_as_ml_dtypes() -> None:
    expected = CODES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert torch.equal(bits(codecs.decode_e4m3fn(CODES, torch.float32)), bits(torch.from_numpy(expected)))


def test_nan_keeps_its_sign() -> None:
    decoded = codecs.decode_e4m3fn(torch.tensor([0x7F, 0xFF], dtype=torch.uint8), torch.float32)
    assert torch.signbit(decoded).tolist() == [False, True]


@pytest.mark.parametrize("dtype", FLOATS)
def test_e8m0_decodes_as_torch_casts(dtype: torch.dtype) -> None:
    assert torch.equal(bits(codecs.decode_e8m0(CODES, dtype)), bits(all_codes(E8).to(dtype)))


def test_e8m0_decodes_as_ml_dtypes() -> None:
    expected = CODES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert torch.equal(bits(codecs.decode_e8m0(CODES, torch.float32)), bits(torch.from_numpy(expected)))


@pytest.mark.parametrize("format_", [E4M3FN, E8M0], ids=["e4m3fn", "e8m0"])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((0,), (2,)), ((4, 0), (8, 1)), ((4, 0), (1, 4)), ((0, 8), (16, 1)), ((2, 0, 4), (32, 8, 2))],
)
def test_tensors_without_elements_keep_their_strides_as_in_torch_casts(
    format_: ByteFormat, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    values = torch.empty_strided(shape, strides)
    encoded = values.to(format_.dtype)
    assert format_.encode(values).stride() == encoded.stride() == strides
    assert format_.decode(encoded.view(torch.uint8), torch.float32).stride() == encoded.float().stride() == strides


@pytest.mark.parametrize("dtype", FLOATS)
def test_encode_is_the_inverse_of_decode(dtype: torch.dtype) -> None:
    assert torch.equal(codecs.encode_e4m3fn(codecs.decode_e4m3fn(CODES, dtype)), CODES)
    scales = CODES if dtype is not torch.float16 else CODES[127 - 24 : 127 + 16]
    assert torch.equal(codecs.encode_e8m0(codecs.decode_e8m0(scales, dtype)), scales)


def reference_e4m3fn(values: Tensor) -> Tensor:
    """ml_dtypes' cast, round to nearest even, of magnitudes limited to 448; NaN and signs as they are."""
    limited = torch.where(values.isnan(), values, values.clamp(-448, 448)).float().numpy()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_of_every_16_bit_float(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert torch.equal(codecs.encode_e4m3fn(every), reference_e4m3fn(every))
    assert torch.equal(codecs.encode_e8m0(every), every.to(E8).view(torch.uint8))


def ties_and_neighbours() -> Tensor:
    """Every e4m3fn value, every midpoint of two, and the floats next to all of them."""
    magnitudes = all_codes()[:0x7F].double()
    points = torch.cat([magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2, torch.tensor([464.0, 480.0])]).float()
    up, down = torch.nextafter(points, torch.tensor(math.inf)), torch.nextafter(points, torch.tensor(-1.0))
    return torch.cat([points, up, down, -points, -up, -down])


def test_encode_of_ties_and_their_neighbours() -> None:
    values = ties_and_neighbours()
    assert torch.equal(codecs.encode_e4m3fn(values), reference_e4m3fn(values))


def test_encode_of_random_bit_patterns() -> None:
    generator = torch.Generator().manual_seed(7)
    patterns = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator).to(torch.int32).view(torch.float32)
    assert torch.equal(codecs.encode_e4m3fn(patterns), reference_e4m3fn(patterns))
    assert torch.equal(codecs.encode_e8m0(patterns), patterns.to(E8).view(torch.uint8))


@pytest.mark.skipif("DEEPINFER_EXHAUSTIVE" not in os.environ, reason="set DEEPINFER_EXHAUSTIVE=1: takes 20 minutes")
@pytest.mark.timeout(7200)
def test_encode_of_every_32_bit_float() -> None:
    step = 1 << 23
    for start in range(-(2**31), 2**31, step):
        patterns = torch.arange(start, start + step, dtype=torch.int64).to(torch.int32).view(torch.float32)
        assert torch.equal(codecs.encode_e4m3fn(patterns), reference_e4m3fn(patterns))
        assert torch.equal(codecs.encode_e8m0(patterns), patterns.to(E8).view(torch.uint8))


def test_encode_saturates_whatever_torch_does() -> None:
    values = torch.tensor([448.0, 464, 465, 480, 1e4, math.inf, -math.inf, math.nan, -0.0, -1e-9])
    assert codecs.encode_e4m3fn(values).tolist() == [0x7E] * 6 + [0xFE, 0x7F, 0x80, 0x80]


@pytest.mark.skipif(not SATURATES, reason="this torch makes NaN of values beyond 464")
def test_encode_is_what_this_torch_does() -> None:
    values = torch.cat([ties_and_neighbours(), torch.tensor([1e4, math.inf, -math.inf, -0.0])])
    assert torch.equal(codecs.encode_e4m3fn(values), values.to(F8).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_encode_of_other_types_goes_through_float32(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 2, 17, 19, 57, 200, 255]).to(dtype)
    assert torch.equal(codecs.encode_e4m3fn(values), values.to(F8).view(torch.uint8))


class TestFills:
    @pytest.mark.parametrize("fmt", [E4M3FN, E8M0], ids=["e4m3fn", "e8m0"])
    def test_a_number_is_encoded_as_a_tensor_is(self, fmt: object) -> None:
        generator = torch.Generator().manual_seed(3)
        exponents = torch.randint(-150, 128, (4000,), generator=generator).double()
        drawn = (torch.rand(4000, generator=generator).double() * 4 - 2) * 2.0**exponents
        special = [0.0, -0.0, 448, 464, 465, 1e39, -1e39, math.inf, math.nan, 2**-127, 1.5 * 2.0**127, True, 2**70]
        numbers = [*drawn.tolist(), *special, *ties_and_neighbours().tolist()]
        tensor = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        assert [encoded_numbers.encode_number(number, fmt) for number in numbers] == fmt.encode(tensor).tolist()

    def test_a_number_that_fp8_holds_is_left_alone(self) -> None:
        for value in all_codes().float().tolist():
            assert math.isnan(value) or encoded_numbers.round_number(value, E4M3FN) == value

    def test_nested_data(self) -> None:
        assert encoded_numbers.encode_nested([[1.0, -2], (True, 1e9)], E4M3FN) == [[0x38, 0xC0], [0x38, 0x7E]]

    def test_data_that_are_no_numbers(self) -> None:
        with pytest.raises(TypeError, match="expected numbers, found str"):
            encoded_numbers.encode_nested(["1.0"], E4M3FN)


def operations(codec: object, *args: object) -> list[str]:
    """The aten operations that a codec is traced to."""
    graph = make_fx(lambda tensor: codec(tensor, *args[1:]), tracing_mode="fake")(args[0]).graph  # type: ignore[operator]
    return [str(node.target) for node in graph.nodes if node.op == "call_function" and "detach" not in str(node.target)]


FORBIDDEN = ("exp", "pow", "ldexp", "shift", "bitwise", "and", "or", "index", "gather", "embedding", "round")


class TestCost:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_decode_takes_eleven_operations(self, dtype: torch.dtype) -> None:
        assert len(operations(codecs.decode_e4m3fn, CODES, dtype)) == 11

    @pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 29), (torch.bfloat16, 30)])
    def test_an_encode_takes_thirty_at_most(self, dtype: torch.dtype, count: int) -> None:
        assert len(operations(codecs.encode_e4m3fn, torch.zeros(4, dtype=dtype))) == count

    def test_nothing_that_the_device_does_slowly_or_inexactly(self) -> None:
        used = {
            *operations(codecs.decode_e4m3fn, CODES, torch.bfloat16),
            *operations(codecs.decode_e8m0, CODES, torch.float32),
            *operations(codecs.encode_e4m3fn, torch.zeros(4)),
            *operations(codecs.encode_e8m0, torch.zeros(4)),
        }
        names = {name.split(".")[1].strip("_") for name in used}
        assert not names & set(FORBIDDEN)

    def test_arithmetic_is_on_floats(self) -> None:
        """Integers are converted, viewed and compared; the one sum is the sign of an encoded byte."""
        graph = make_fx(codecs.encode_e4m3fn, tracing_mode="fake")(torch.zeros(4)).graph
        sums = [
            node.meta["val"].dtype
            for node in graph.nodes
            if str(node.target).split(".")[-2:-1] and str(node.target).split(".")[1] in ("add", "sub", "mul", "rsub")
        ]
        assert sums.count(torch.int32) == 1
        assert set(sums) == {torch.int32, torch.float32}


class TestSubnormals:
    """The device may flush float32 subnormals: no intermediate value depends on one."""

    @pytest.fixture(autouse=True)
    def _flush(self) -> object:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormals")
        yield
        torch.set_flush_denormal(False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_decode(self, dtype: torch.dtype) -> None:
        decoded = codecs.decode_e4m3fn(CODES.repeat(4), dtype)[:256]
        torch.set_flush_denormal(False)
        assert torch.equal(bits(decoded), bits(all_codes().to(dtype)))

    def test_encode(self) -> None:
        values = ties_and_neighbours()
        encoded = codecs.encode_e4m3fn(values)
        torch.set_flush_denormal(False)
        assert torch.equal(encoded, reference_e4m3fn(values))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(6, 8),
        lambda t: t[1:2, 3:4],
        lambda t: t.view(2, 3, 8).permute(1, 2, 0),
        lambda t: t[0, 0],
        lambda t: t[:0],
    ],
)
def test_results_are_laid_out_as_a_cast_lays_them_out(view: object) -> None:
    """What follows in a graph may depend on strides."""
    codes = view(torch.arange(48, dtype=torch.uint8).view(6, 8))  # type: ignore[operator]
    fp8 = codes.view(F8)
    floats = view(torch.arange(48.0).view(6, 8))  # type: ignore[operator]
    assert_same_layout(codecs.decode_e4m3fn(codes, torch.float32), fp8.to(torch.float32))
    assert_same_layout(codecs.decode_e8m0(codes, torch.float32), fp8.to(torch.float32))
    assert_same_layout(codecs.encode_e4m3fn(floats), floats.to(F8))
    assert_same_layout(codecs.encode_e8m0(floats), floats.to(F8))


def assert_same_layout(actual: Tensor, expected: Tensor) -> None:
    """Equal strides, but for dimensions of size one, whose stride means nothing."""
    real = [dim for dim in range(expected.dim()) if expected.size(dim) > 1]
    assert [actual.stride(dim) for dim in real] == [expected.stride(dim) for dim in real]


def test_aot_looks_into_a_codec_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its two runs over a graph only the one that records operations sees those of a codec."""
    calls = []

    def count(values: Tensor) -> Tensor:
        calls.append(values)
        return codecs.encode_e4m3fn(values)

    monkeypatch.setattr(codec_operations.encode_e4m3fn, "_codec", count)
    options = {"base_backend": "aot_eager"}
    result = torch.compile(lambda x: x.to(F8), backend="deepinfer_neuron", options=options)(torch.ones(4))
    assert torch.equal(bits(result), bits(torch.ones(4).to(F8)))
    assert len(calls) == 1

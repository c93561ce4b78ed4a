"""GEMMs on prepared weights: which kernel is launched with what, and that every path gives the same numbers."""

from __future__ import annotations

import pytest
import torch

from deepinfer_prep import kernel_layout
from deepinfer_prep.errors import PrepError
from deepinfer_prep.kernels import reference
from deepinfer_prep.runtime import gemm
from deepinfer_prep.runtime.attributes import KERNEL_ORDER, KERNEL_WEIGHT
from tests.runtime.fake_neuron import FakeNeuron
from tests.runtime.models import Layer, e8m0, fp8, random_codes


def scale_codes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(120, 132, shape, generator=generator, dtype=torch.uint8)


def prepared(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    model = Layer(weight)
    model.weight.sf = scale
    assert gemm.prepare_model(model) == 1
    return model.weight


def fp8_weight(n: int = 64, k: int = 256) -> torch.Tensor:
    return prepared(fp8(random_codes(n, k, highest=0x76)), scale_codes(-(-n // 32), -(-k // 32)))


def fp4_weight(n: int = 64, k: int = 256) -> torch.Tensor:
    return prepared(random_codes(n, k // 2).view(torch.int8), scale_codes(n, k // 32))


def block128_weight(n: int = 64, k: int = 256) -> torch.Tensor:
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=torch.Generator().manual_seed(2)) + 0.1
    return prepared(fp8(random_codes(n, k, highest=0x76)), scale)


def activations(m: int, k: int = 256) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(3)).bfloat16()


def exact(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the sum of magnitudes that bounds its error."""
    y = x.double() @ weight.double().T
    return y, x.double().abs() @ weight.double().abs().T


def assert_close(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    y, magnitude = exact(x, weight)
    assert result.dtype == torch.bfloat16
    assert result.shape == y.shape
    assert ((result.double() - y).abs() <= 2**-8 * y.abs() + 2**-20 * magnitude).all()


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """A weight in float64, from torch's own decoding of its dtype and its own scale."""
    scale = weight.sf
    if weight.dtype == torch.int8:
        return reference.dequantize_fp4(weight.data.view(torch.uint8), scale, torch.float64)
    block = 128 if scale.dtype == torch.float32 else 32
    factors = scale.double() if block == 128 else torch.exp2(scale.double() - 127)
    full = factors.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
    return weight.double() * full


# On a host


SIZES = [(fp8_weight, n, k) for n, k in ((64, 256), (96, 128), (100, 300), (33, 32), (256, 160))]
SIZES += [(fp4_weight, n, k) for n, k in ((64, 256), (100, 320), (33, 32))]


@pytest.mark.parametrize(("make", "n", "k"), SIZES)
def test_linear_qdq_of_scales_of_32_columns_rounds_activations(make, n, k):
    weight, x = make(n, k), activations(5, k)
    rounded = reference.fp8_round_trip(torch.nn.functional.pad(x, (0, -k % 32)))[:, :k]
    assert not torch.equal(rounded, x)
    assert_close(gemm.linear_qdq(x, weight), rounded, dequantized(weight))


@pytest.mark.parametrize(("n", "k"), [(64, 256), (100, 320), (96, 128)])
def test_linear_qdq_of_float_scales_keeps_activations(n, k):
    weight, x = block128_weight(n, k), activations(5, k)
    assert_close(gemm.linear_qdq(x, weight), x, dequantized(weight))


@pytest.mark.parametrize("make", [fp8_weight, fp4_weight, block128_weight])
def test_group_picks_an_expert(make):
    single = [make(64, 256) for _ in range(3)]
    for index, weight in enumerate(single):
        weight.data.view(torch.uint8).bitwise_and_((0xFF, 0xF7, 0x83)[index])
    stacked = prepared(torch.stack([w.data for w in single]), torch.stack([w.sf for w in single]))
    x = activations(3)
    for index, weight in enumerate(single):
        assert torch.equal(gemm.linear_qdq(x, stacked, index), gemm.linear_qdq(x, weight))


@pytest.mark.parametrize("make", [fp8_weight, fp4_weight])
def test_bare_weight_and_scale(make):
    weight, x = make(), activations(3)
    assert torch.equal(gemm.linear_qdq_raw(x, weight._nki_weight, weight._nki_scale), gemm.linear_qdq(x, weight))


@pytest.mark.parametrize("make", [fp8_weight, fp4_weight, block128_weight])
@pytest.mark.parametrize("form", ["e8m0", "uint8", "int32", "column major", "padded rows"])
def test_gemm_dequantizes_activations_exactly(make, form):
    weight, codes, factors = make(), random_codes(5, 256, highest=0x76), scale_codes(5, 8)
    scales = {
        "e8m0": factors.view(torch.float8_e8m0fnu),
        "uint8": factors,
        "int32": factors.view(torch.int32),
        "column major": factors.view(torch.int32).t().contiguous().t(),
        "padded rows": torch.cat([factors, scale_codes(3, 8)]),
    }
    d = torch.full((7, 64), 9.0, dtype=torch.bfloat16)
    assert gemm.gemm(fp8(codes), scales[form], weight, d) is None
    a = fp8(codes).double() * torch.exp2(factors.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(a, a.bfloat16().double())
    assert_close(d[:5], a, dequantized(weight))
    assert (d[5:] == 9.0).all()


def test_gemm_takes_bytes_for_activations_and_picks_a_group():
    stacked = prepared(fp8(random_codes(2, 64, 256, highest=0x76)), scale_codes(2, 2, 8))
    codes, factors = random_codes(3, 256, highest=0x76), e8m0(3, 8)
    first, second = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(3, 64, dtype=torch.bfloat16)
    gemm.gemm(codes, factors, stacked, first, group=1)
    gemm.gemm(fp8(codes), factors, prepared(stacked.data[1], stacked.sf[1]), second)
    assert torch.equal(first, second)


@pytest.mark.parametrize("scale", [torch.ones(3, 8), e8m0(2, 8), e8m0(3, 7), e8m0(24)])
def test_gemm_refuses_scales_that_do_not_fit(scale):
    d = torch.zeros(3, 64, dtype=torch.bfloat16)
    with pytest.raises(PrepError, match=r"expected e8m0 scales of \[3, 8\] for activations of \[3, 256\], found"):
        gemm.gemm(fp8(random_codes(3, 256)), scale, fp8_weight(), d)


def test_weight_that_is_not_prepared():
    weight = fp8(random_codes(64, 256))
    assert not gemm.has_kernel(weight)
    with pytest.raises(PrepError, match=r"shape \[64, 256\] is not prepared .* gemm\.prepare_model"):
        gemm.linear_qdq(activations(3), weight)
    assert gemm.linear_qdq_gated(activations(3), weight, None, torch.ones(1, 1, dtype=torch.int32)) is None


def test_gated_on_a_host(monkeypatch):
    weight, x = fp4_weight(256), activations(3)
    for value, expected in ((1, gemm.linear_qdq(x, weight)), (0, torch.zeros(3, 256)), (2, torch.zeros(3, 256))):
        flag = torch.tensor([[value]], dtype=torch.int32)
        assert torch.equal(gemm.linear_qdq_gated(x, weight, None, flag), expected.bfloat16())
    flag = torch.ones(1, 1, dtype=torch.int32)
    assert gemm.linear_qdq_gated(x, fp8_weight(256), None, flag) is None
    assert gemm.linear_qdq_gated(x, fp4_weight(128), None, flag) is None
    monkeypatch.setenv("DEEPINFER_NEURON_BQ_2CORE", "0")
    assert gemm.linear_qdq_gated(x, weight, None, flag) is None


def test_nothing_is_supported_on_a_host():
    assert not gemm.supported(activations(3), fp8_weight(), 256, 64)


@pytest.mark.parametrize("make", [fp8_weight, fp4_weight, block128_weight])
def test_host_path_is_one_graph(make):
    weight, x = make(), activations(3)
    compiled = torch.compile(lambda rows: gemm.linear_qdq(rows, weight), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), gemm.linear_qdq(x, weight))


@pytest.mark.parametrize("words", [torch.uint8, torch.int32])
def test_gemm_on_a_host_is_one_graph(words):
    weight, codes, factors = fp8_weight(), random_codes(3, 256, highest=0x76), scale_codes(3, 8)

    def step(a: torch.Tensor, sfa: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        gemm.gemm(a, sfa, weight, d)
        return d + 1

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        d = torch.zeros(4, 64, dtype=torch.bfloat16)
        results.append((function(fp8(codes), factors.view(words), d), d))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


# On a device: the real kernels in the emulator


CASES = [
    (fp8_weight, 64, "fp8_linear"),
    (fp8_weight, 256, "fp8_linear_2core"),
    (fp4_weight, 64, "fp4_linear"),
    (fp4_weight, 256, "fp4_linear_2core"),
    (block128_weight, 64, "fp8_linear_block128"),
    (block128_weight, 256, "fp8_linear_block128_2core"),
]


@pytest.mark.parametrize(("make", "n", "kernel"), CASES)
def test_linear_qdq_launches_the_kernel(fake_neuron: FakeNeuron, make, n, kernel):
    weight, x = make(n), activations(5)
    assert gemm.supported(x, weight, 256, n)
    result = gemm.linear_qdq(x, weight)
    assert fake_neuron.calls == [kernel]
    rounded = x if make is block128_weight else reference.fp8_round_trip(x)
    assert_close(result, rounded, dequantized(weight))


@pytest.mark.parametrize(("n", "cores"), [(64, ""), (256, "_2core")])
@pytest.mark.parametrize(("make", "kernel"), [(fp8_weight, "fp8_linear_raw"), (fp4_weight, "fp4_linear_raw")])
def test_gemm_launches_the_raw_kernel(fake_neuron: FakeNeuron, make, kernel, n, cores):
    weight, codes = make(n), random_codes(3, 256, highest=0x76)
    d = torch.zeros(4, n, dtype=torch.bfloat16)
    gemm.gemm(fp8(codes), e8m0(3, 8, value=125), weight, d)
    assert fake_neuron.calls == [kernel + cores]
    assert_close(d[:3], fp8(codes).double() / 4, dequantized(weight))
    assert (d[3] == 0).all()


def in_kernel_order(weight: torch.Tensor) -> torch.Tensor:
    """A prepared weight with its bytes in the kernels' order, as loading leaves it."""
    stored = getattr(weight, KERNEL_WEIGHT)
    element = "e2m1" if stored.shape[1] * 2 == 256 else "e4m3"
    setattr(weight, KERNEL_WEIGHT, torch.from_numpy(kernel_layout.weight_to_kernel_order(stored.numpy(), element)))
    setattr(weight, KERNEL_ORDER, True)
    return weight


@pytest.mark.parametrize(("make", "n", "kernel"), CASES)
def test_a_weight_in_the_kernels_order_goes_to_the_kernels_that_know_it(fake_neuron: FakeNeuron, make, n, kernel):
    x = activations(5)
    expected, result = gemm.linear_qdq(x, make(n)), gemm.linear_qdq(x, in_kernel_order(make(n)))
    name, two_core = kernel.removesuffix("_2core"), "_2core" if kernel.endswith("_2core") else ""
    assert fake_neuron.calls == [kernel, f"{name}_kmajor{two_core}"]
    assert (result.double() - expected.double()).norm() <= 2.0**-8 * expected.double().norm()


def test_the_gated_kernel_knows_the_order_too(fake_neuron: FakeNeuron):
    weight, x = in_kernel_order(fp4_weight(256)), activations(3)
    on = gemm.linear_qdq_gated(x, weight, None, torch.ones(1, 1, dtype=torch.int32))
    off = gemm.linear_qdq_gated(x, weight, None, torch.zeros(1, 1, dtype=torch.int32))
    assert fake_neuron.calls == ["fp4_linear_kmajor_2core_gated"] * 2
    assert torch.equal(on, gemm.linear_qdq(x, weight))
    assert (off == 0).all()


def test_gated_kernel(fake_neuron: FakeNeuron):
    weight, x = fp4_weight(256), activations(3)
    on = gemm.linear_qdq_gated(x, weight, None, torch.ones(1, 1, dtype=torch.int32))
    off = gemm.linear_qdq_gated(x, weight, None, torch.zeros(1, 1, dtype=torch.int32))
    assert fake_neuron.calls == ["fp4_linear_2core_gated"] * 2
    assert fake_neuron.wrapped == {"blockquant.fp4_linear_2core_gated": 1}
    assert torch.equal(on, gemm.linear_qdq(x, weight))
    assert (off == 0).all()


def test_every_kernel_is_wrapped_once_with_its_own_grid(fake_neuron: FakeNeuron):
    for _ in range(2):
        for make, n, _kernel in CASES:
            gemm.linear_qdq(activations(2), make(n))
    assert set(fake_neuron.wrapped.values()) == {1}
    assert fake_neuron.grids == {
        f"blockquant.{kernel}": (2,) if kernel.endswith("_2core") else (1,) for _, _, kernel in CASES
    }


def test_switches_and_core_counts(fake_neuron: FakeNeuron, monkeypatch):
    weight, x = fp8_weight(256), activations(2)
    both = gemm.linear_qdq(x, weight)
    monkeypatch.setenv("DEEPINFER_NEURON_BQ_2CORE", "0")
    one = gemm.linear_qdq(x, weight)
    monkeypatch.delenv("DEEPINFER_NEURON_BQ_2CORE")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    gemm.linear_qdq(x, weight)
    assert fake_neuron.calls == ["fp8_linear_2core", "fp8_linear", "fp8_linear"]
    assert torch.equal(both, one)
    monkeypatch.setenv("DEEPINFER_NEURON_NKI_GEMM", "0")
    assert not gemm.supported(x, weight, 256, 256)
    in_torch = gemm.linear_qdq(x, weight)
    assert len(fake_neuron.calls) == 3
    assert_close(in_torch, reference.fp8_round_trip(x), dequantized(weight))


@pytest.mark.parametrize(("n", "k"), [(33, 256), (64, 160), (100, 128)])
def test_shapes_outside_the_kernels_run_in_torch(fake_neuron: FakeNeuron, n, k):
    weight, x = fp8_weight(n, k), activations(2, k)
    assert not gemm.supported(x, weight, k, n)
    assert_close(gemm.linear_qdq(x, weight), reference.fp8_round_trip(x), dequantized(weight))
    assert fake_neuron.calls == []


def test_supported_needs_a_prepared_weight(fake_neuron: FakeNeuron):
    assert not gemm.supported(activations(2), fp8(random_codes(64, 256)), 256, 64)


def test_many_rows_are_launched_in_turns(fake_neuron: FakeNeuron):
    weight, x = fp8_weight(32, 128), activations(600, 128)
    result = gemm.linear_qdq(x, weight)
    assert [shapes[0] for shapes in fake_neuron.shapes] == [(512, 128), (88, 128)]
    assert_close(result, reference.fp8_round_trip(x), dequantized(weight))
    assert gemm.linear_qdq(x[:0], weight).shape == (0, 32)


def test_activations_with_strides_are_made_contiguous(fake_neuron: FakeNeuron):
    weight, x = fp8_weight(), activations(2, 512)[:, ::2]
    assert_close(gemm.linear_qdq(x, weight), reference.fp8_round_trip(x), dequantized(weight))
    assert fake_neuron.calls == ["fp8_linear"]


def test_experts_on_the_device(fake_neuron: FakeNeuron):
    stacked = prepared(random_codes(3, 256, 64).view(torch.int8), scale_codes(3, 256, 4))
    x, flag = activations(2, 128), torch.ones(1, 1, dtype=torch.int32)
    for group in range(3):
        single = prepared(stacked.data[group], stacked.sf[group])
        assert torch.equal(gemm.linear_qdq_gated(x, stacked, group, flag), gemm.linear_qdq(x, single))

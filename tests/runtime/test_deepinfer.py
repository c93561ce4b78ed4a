"""The modules of the serving code under their own names: every name, parameter, switch and attribute effect."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry

from deepinfer_prep.runtime import gemm, mhc, neuron
from deepinfer_prep.runtime.deepinfer import fp8, neuron_compile, nki_gemm, nki_hc
from tests.runtime.models import Layer, attribute, codes_of, e8m0, every_code, frozen, halved, random_codes

E4M3 = torch.float8_e4m3fn
SIGNATURES: dict[Callable[..., Any], str] = {
    fp8.configure_compiler: "",
    fp8.halve_e4m3fn_bytes: "b",
    fp8.rescale_fp8_weights: "model",
    fp8.describe: "",
    nki_gemm.prepare_model: "model",
    nki_gemm.supported: "a, b, k, n",
    nki_gemm.gemm: "a, sfa, b, d, group=None",
    nki_gemm.linear_qdq: "x, w, group=None",
    nki_gemm.linear_qdq_raw: "x, weight, scale",
    nki_gemm.linear_qdq_gated: "x, w, group, flag",
    nki_gemm.has_kernel: "w",
    nki_hc.active: "t",
    nki_hc.expand_supported: "hidden, hc_mult",
    nki_hc.expand: "hidden, hc_mult",
    nki_hc.pre_apply_mix: "x, mix",
    nki_hc.post: "x, residual, post_layer_mix, comb_res_mix",
    nki_hc.split_fn: "fn",
    nki_hc.prepare_model: "model",
    nki_hc.mixes_supported: "residual, norm_eps, pre_eps, sinkhorn_eps, post_mult_value, sinkhorn_repeat",
    nki_hc.mixes: "residual, fn, scale, base",
    nki_hc.pre_big_fuse: "residual, fn, scale, base",
    neuron_compile.encode_codes: "x",
    neuron_compile.legalize_fp8: "gm",
    neuron_compile.deepinfer_neuron: "gm, example_inputs, **kwargs",
}


def without_annotations(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))[1:-1]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_every_signature_is_the_one_that_serving_code_calls(function: Callable[..., Any]) -> None:
    assert without_annotations(function) == SIGNATURES[function]


def test_every_name_is_there() -> None:
    for module in (fp8, nki_gemm, nki_hc, neuron_compile):
        functions = {
            function.__name__ for function in SIGNATURES if getattr(module, function.__name__, None) is function
        }
        values = {"fp8": {"FP8_MAX"}, "nki_gemm": {"ENABLED", "TWO_CORE"}, "nki_hc": {"ENABLED"}}
        assert set(module.__all__) == functions | values.get(module.__name__.rpartition(".")[2], set())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as one on a Neuron device."""
    monkeypatch.setattr(neuron, "holds", lambda tensor: True)


def model() -> Layer:
    made = Layer(random_codes(256, 128, highest=0x77).view(E4M3))
    made.weight.sf = e8m0(8, 4)
    return made


# fp8


def test_fp8_max_is_a_number_read_at_import() -> None:
    code = (
        "from deepinfer_prep.runtime.deepinfer import fp8; import os\n"
        "os.environ['DEEPINFER_NEURON_FP8_MAX'] = '224'; print(fp8.FP8_MAX)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DEEPINFER_NEURON_FP8_MAX": "448"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "448.0\n"


def test_halving_and_rescaling() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    finite = (codes & 0x7F) != 0x7F
    assert torch.equal(fp8.halve_e4m3fn_bytes(codes)[finite], halved(codes)[finite])
    layer = Layer(every_code())
    layer.weight.sf = e8m0(2, 2)
    before = codes_of(layer.weight)
    assert (fp8.rescale_fp8_weights(layer), fp8.rescale_fp8_weights(layer)) == (1, 0)
    assert torch.equal(codes_of(layer.weight), halved(before))


def test_above_240_nothing_is_rescaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "FP8_MAX", 448.0)
    layer = Layer(every_code())
    layer.weight.sf = e8m0(2, 2)
    assert fp8.rescale_fp8_weights(layer) == 0
    assert int(codes_of(layer.weight).max()) > 0xF7


# nki_gemm


def test_a_weight_has_a_kernel_on_the_device_alone_and_while_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = model()
    assert nki_gemm.prepare_model(layer) == 1
    assert not nki_gemm.has_kernel(layer.weight)
    assert not nki_gemm.has_kernel(None)
    monkeypatch.setattr(neuron, "holds", lambda tensor: True)
    assert nki_gemm.has_kernel(layer.weight)
    assert nki_gemm.supported(layer.weight, layer.weight, 128, 256)
    assert not nki_gemm.has_kernel(frozen(torch.zeros(4)))
    monkeypatch.setattr(nki_gemm, "ENABLED", False)
    assert not nki_gemm.has_kernel(layer.weight)
    assert not nki_gemm.supported(layer.weight, layer.weight, 128, 256)


def test_nothing_is_attached_while_not_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = model()
    monkeypatch.setattr(nki_gemm, "ENABLED", False)
    assert nki_gemm.prepare_model(layer) == 0
    assert set(vars(layer.weight)) == {"sf"}


def test_switches_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, variable in (
        (nki_gemm, "ENABLED", "DEEPINFER_NEURON_NKI_GEMM"),
        (nki_gemm, "TWO_CORE", "DEEPINFER_NEURON_BQ_2CORE"),
        (nki_hc, "ENABLED", "DEEPINFER_NEURON_NKI_HC"),
    ):
        monkeypatch.setenv(variable, "0")
        assert getattr(module, name) is False
        setattr(module, name, True)
        assert os.environ[variable] == "1"
        assert getattr(module, name) is True


def test_linears_give_what_the_runtime_gives_with_a_row_for_each_of_x() -> None:
    layer, x = model(), torch.randn(5, 128).to(torch.bfloat16)
    nki_gemm.prepare_model(layer)
    expected = gemm.linear_qdq(x, layer.weight)
    weight, scale = attribute(layer.weight, "_nki_weight"), attribute(layer.weight, "_nki_scale")
    for result in (nki_gemm.linear_qdq(x, layer.weight), nki_gemm.linear_qdq_raw(x, weight=weight, scale=scale)):
        assert result.shape == (5, 256)
        assert torch.equal(result, expected)
    assert nki_gemm.linear_qdq_gated(x, layer.weight, None, torch.ones(1, 1, dtype=torch.int32)) is None


def test_fp4_weights_take_x_through_fp8_and_back() -> None:
    layer = Layer(torch.randint(-128, 128, (256, 64), dtype=torch.int8))
    layer.weight.sf = e8m0(256, 4, value=120)
    assert nki_gemm.prepare_model(layer) == 1
    x = torch.randn(4, 128).to(torch.bfloat16)
    blocks = x.float().reshape(4, 4, 32)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 224)))
    rounded = ((blocks / scale).to(E4M3).float() * scale).reshape(4, 128).to(torch.bfloat16)
    assert not torch.equal(rounded, x)
    assert torch.equal(nki_gemm.linear_qdq(x, layer.weight), nki_gemm.linear_qdq(rounded, layer.weight))


# nki_hc


def test_splitting_attaches_and_returns_nothing() -> None:
    fn = frozen(torch.randn(24, 256))
    assert nki_hc.split_fn(fn) is None
    hi, lo = mhc.split_fn(fn)
    assert torch.equal(attribute(fn, "_nki_fn_hi"), hi)
    assert torch.equal(attribute(fn, "_nki_fn_lo"), lo)


def test_hyper_connections_are_active_on_the_device_while_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert not nki_hc.active(x)
    monkeypatch.setattr(neuron, "holds", lambda tensor: True)
    assert nki_hc.active(x)
    assert nki_hc.expand_supported(x, 4)
    monkeypatch.setattr(nki_hc, "ENABLED", False)
    assert not nki_hc.active(x)
    assert not nki_hc.expand_supported(x, 4)


def test_the_way_out_of_a_layer_takes_the_names_of_serving_code() -> None:
    x, residual = torch.randn(3, 64).to(torch.bfloat16), torch.randn(3, 4, 64).to(torch.bfloat16)
    post, comb = torch.rand(3, 4, 1), torch.rand(3, 4, 4)
    result = nki_hc.post(x, residual, post_layer_mix=post, comb_res_mix=comb)
    assert torch.equal(result, mhc.post(x, residual, post, comb))


# neuron_compile


def test_codes_are_those_of_the_cast_as_int32() -> None:
    values = torch.cat([torch.linspace(-448, 448, 10_001), torch.randn(1000) / 64, torch.zeros(1)])
    codes = neuron_compile.encode_codes(values)
    assert codes.dtype == torch.int32
    assert torch.equal(codes, values.to(E4M3).view(torch.uint8).int())


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """The graph that a backend of torch.compile is handed."""
    found = []

    def keep(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch.compile(function, backend=keep, dynamic=False)(*inputs)
    return found[0]


def test_a_graph_is_rewritten_in_place() -> None:
    codes, x = codes_of(every_code(16, 16)), torch.randn(4, 16)
    gm = graph_of(lambda w, x: x @ w.float(), codes.view(E4M3), x)
    assert neuron_compile.legalize_fp8(gm) is True
    (result,) = gm(codes, x)
    assert torch.equal(result, x @ codes.view(E4M3).float())
    plain = graph_of(lambda x: x + 1, x)
    assert neuron_compile.legalize_fp8(plain) is False


def test_importing_the_module_registers_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deepinfer_neuron" in registry.list_backends(exclude_tags=())
    monkeypatch.setattr(registry, "_BACKENDS", {})
    monkeypatch.setattr(registry, "_COMPILER_FNS", {})
    monkeypatch.setattr(registry, "_lazy_import", lambda: None)
    importlib.reload(neuron_compile)
    assert registry.list_backends(exclude_tags=()) == ["deepinfer_neuron"]


def test_the_backend_compiles_as_the_runtime_does() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return neuron_compile.deepinfer_neuron(gm, example_inputs, options={"base_backend": "eager"})

    x = torch.randn(2, 8)
    assert torch.equal(torch.compile(layer, backend=backend)(x), layer(x))

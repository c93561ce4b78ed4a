"""Kernels inside a compiled graph: wrapped while it is traced, once, and called with what the graph holds."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nki_emulator
import pytest
import torch

from deepinfer_prep.errors import NeuronUnavailableError
from deepinfer_prep.kernels import reference
from deepinfer_prep.runtime import gemm, kernel_launch, neuron
from tests.runtime.fake_neuron import FakeNeuron
from tests.runtime.models import Layer, fp8, random_codes

_LIBRARY = torch.library.Library("emulated", "DEF")
_LIBRARY.define("fp8_linear_2core(Tensor x, Tensor w, Tensor scale) -> Tensor")
_LIBRARY.impl("fp8_linear_2core", lambda x, w, scale: _run(x, w, scale), "CompositeExplicitAutograd")
_WRAPPED: list[str] = []


@torch.library.register_fake("emulated::fp8_linear_2core", lib=_LIBRARY)
def _(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _run(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from deepinfer_prep.kernels import blockquant

    return nki_emulator.run(blockquant.fp8_linear_2core, x, w, scale, grid=2).output


class Caller:
    """As traceable as the real caller: Python that ends in an operator which the graph may hold."""

    def __getitem__(self, grid: tuple[int, ...]) -> Caller:
        assert grid == (2,)
        return self

    def __call__(self, x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.ops.emulated.fp8_linear_2core(x, w, scale)


def wrap(kernel: Any) -> Caller:
    _WRAPPED.append(kernel.__name__)
    return Caller()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_kernel_in_one_graph(monkeypatch, backend):
    nki_emulator.install()
    _WRAPPED.clear()
    hop = types.ModuleType("torch_neuronx.nki_hop")
    hop.wrap_nki = wrap
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    monkeypatch.setitem(sys.modules, "torch_neuronx.nki_hop", hop)
    monkeypatch.setattr(neuron, "holds", lambda tensor: True)
    monkeypatch.setattr(kernel_launch, "_wrapped", types.ModuleType("wrapped_kernels"))
    model = Layer(fp8(random_codes(256, 128, highest=0x76)))
    model.weight.sf = random_codes(8, 4) & 0x07 | 0x78
    gemm.prepare_model(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        return gemm.linear_qdq(x, model.weight) + gemm.linear_qdq(x * 2, model.weight)

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    for m in (3, 5, 3):
        x = torch.randn(m, 128, generator=torch.Generator().manual_seed(m)).bfloat16()
        expected = sum(nki_expected(part, model.weight._nki_weight, model.weight._nki_scale) for part in (x, x * 2))
        assert torch.equal(compiled(x), expected)
        assert torch.equal(step(x), expected)
    assert _WRAPPED == ["fp8_linear_2core"]


def nki_expected(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    result = _run(x, w, scale)
    assert (result.float() - reference.fp8_linear(x, w, scale).float()).abs().max() <= 2**-6 * result.abs().max()
    return result


def test_missing_wrap_nki_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(neuron, "_WRAP_NKI_MODULES", ("no_such_module",))
    monkeypatch.setattr(kernel_launch, "_wrapped", types.ModuleType("wrapped_kernels"))
    with pytest.raises(NeuronUnavailableError):
        kernel_launch.kernel("fp8_linear")


def test_threads_that_need_the_same_kernel_wrap_it_once(fake_neuron: FakeNeuron):
    with ThreadPoolExecutor(8) as pool:
        callers = list(pool.map(lambda _: kernel_launch.kernel("fp8_linear"), range(64)))
    assert fake_neuron.wrapped == {"blockquant.fp8_linear": 1}
    assert len(set(map(id, callers))) == 1

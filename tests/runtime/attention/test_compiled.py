"""The attention kernels inside a compiled graph: one launch, held by one graph."""

from __future__ import annotations

import sys
import types
from typing import Any

import nki_emulator
import pytest
import torch
from torch import Tensor

from deepinfer_prep.kernels import attention_reference
from deepinfer_prep.runtime import attention, kernel_launch, neuron

_LIBRARY = torch.library.Library("emulated_attention", "DEF")
_LIBRARY.define("sparse_attn(Tensor q, Tensor kv, Tensor sink, Tensor idx, float scale) -> Tensor")
_LIBRARY.impl("sparse_attn", lambda *arguments: _run(*arguments), "CompositeExplicitAutograd")


@torch.library.register_fake("emulated_attention::sparse_attn", lib=_LIBRARY)
def _(q: Tensor, kv: Tensor, sink: Tensor, idx: Tensor, scale: float) -> Tensor:
    return torch.empty_like(q)


def _run(*arguments: Any) -> Tensor:
    from deepinfer_prep.kernels import sparse_attn

    return nki_emulator.run(sparse_attn.kernel, *arguments, grid=2).output


class Caller:
    """As traceable as the real caller: Python that ends in an operator which the graph may hold."""

    def __getitem__(self, grid: tuple[int, ...]) -> Caller:
        assert grid == (2,)
        return self

    def __call__(self, q: Tensor, kv: Tensor, sink: Tensor, idx: Tensor, scale: float) -> Any:
        return torch.ops.emulated_attention.sparse_attn(q, kv, sink, idx, scale)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_holds_its_launch_in_one_graph(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    nki_emulator.install()
    hop = types.ModuleType("torch_neuronx.nki_hop")
    hop.wrap_nki = lambda kernel: Caller()
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    monkeypatch.setitem(sys.modules, "torch_neuronx.nki_hop", hop)
    monkeypatch.setattr(neuron, "holds", lambda tensor: True)
    monkeypatch.setattr(kernel_launch, "_wrapped", types.ModuleType("wrapped_kernels"))

    def step(q: Tensor, keys: Tensor, cache: Tensor, states: Tensor, positions: Tensor, sink: Tensor) -> Tensor:
        attention.store_rows(cache, attention.window_rows(states, positions, 16), keys)
        return attention.sparse_attn(q, cache, sink, attention.window_lists(states, positions, 16, 8), 0.1)

    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(3, *shape, generator=generator).bfloat16() for shape in ((8, 128), (128,)))
    states, positions = torch.tensor([0, 0, 1]), torch.tensor([6, 7, 0])
    cache, other = torch.zeros(33, 128).bfloat16(), torch.zeros(33, 128).bfloat16()
    found = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)(
        q, keys, cache, states, positions, torch.zeros(8)
    )
    assert torch.equal(found, step(q, keys, other, states, positions, torch.zeros(8)))
    assert torch.equal(cache, other)
    lists = attention.window_lists(states, positions, 16, 8)
    expected = attention_reference.sparse_attn(q, cache, torch.zeros(8), lists, 0.1)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)

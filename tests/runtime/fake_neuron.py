"""A stand-in for a Neuron device and torch_neuronx's wrap_nki: the real kernels, run by the emulator.

It is as strict as the real thing where releases differ: the wrapper takes the bare kernel, is subscripted with a
tuple of ints, never sees one kernel at two grids, and takes contiguous tensors of the types kernels may have, and
numbers.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from typing import Any

import nki_emulator
import pytest
import torch

from deepinfer_prep.runtime import kernel_launch, neuron

_DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.uint8)


class FakeNeuron:
    """What happened on the stand-in device."""

    def __init__(self) -> None:
        self.wrapped: Counter[str] = Counter()
        """How often each kernel was wrapped."""
        self.grids: dict[str, tuple[int, ...]] = {}
        self.calls: list[str] = []
        """Kernels in the order of their launches."""
        self.shapes: list[list[tuple[int, ...]]] = []
        """The shapes of each launch's arguments."""

    def wrap_nki(self, kernel: Any) -> Wrapper:
        """What `torch_neuronx.nki_hop.wrap_nki` is for serving code."""
        assert kernel.grid is None, "wrap the kernel, then subscript the wrapper"
        name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
        self.wrapped[name] += 1
        return Wrapper(self, name, kernel)


class Wrapper:
    """A wrapped kernel, as NKIHOPCaller is."""

    def __init__(self, device: FakeNeuron, name: str, kernel: Any, grid: tuple[int, ...] = ()) -> None:
        self._device, self._name, self._kernel, self._grid = device, name, kernel, grid

    def __getitem__(self, grid: tuple[int, ...]) -> Wrapper:
        return Wrapper(self._device, self._name, self._kernel, tuple(map(int, grid)))

    def __call__(self, *args: torch.Tensor | float) -> Any:
        assert self._device.grids.setdefault(self._name, self._grid) == self._grid, "one kernel at two grids"
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        for tensor in tensors:
            assert tensor.is_contiguous(), "Cannot process non-contiguous tensors"
            assert tensor.dtype in _DTYPES, tensor.dtype
        self._device.calls.append(self._name.rpartition(".")[2])
        self._device.shapes.append([tuple(tensor.shape) for tensor in tensors])
        outputs = nki_emulator.run(self._kernel, *args, grid=self._grid[0]).outputs
        return outputs[0] if len(outputs) == 1 else outputs


@pytest.fixture
def fake_neuron(monkeypatch: pytest.MonkeyPatch) -> FakeNeuron:
    """Make every tensor count as one on a Neuron device, and launches run in the emulator."""
    nki_emulator.install()
    device = FakeNeuron()
    hop = types.ModuleType("torch_neuronx.nki_hop")
    hop.wrap_nki = device.wrap_nki
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    monkeypatch.setitem(sys.modules, "torch_neuronx.nki_hop", hop)
    monkeypatch.setattr(neuron, "holds", lambda tensor: True)
    monkeypatch.setattr(kernel_launch, "_wrapped", types.ModuleType("wrapped_kernels"))
    return device

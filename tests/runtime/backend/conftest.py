"""Every test here runs against the strict stand-in for torch-neuronx, with no switch of the backend set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.backend import stand_in

_VARIABLES = (
    "DEEPINFER_FP8_LEGALIZE_DEBUG",
    "DEEPINFER_NEURON_ALIAS_DEBUG",
    "DEEPINFER_NEURON_DUMP_DIR",
    "DEEPINFER_FP8_LEGALIZE_CHECK",
    "DEEPINFER_NEURON_BASE_BACKEND",
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def compiled() -> Iterator[list[stand_in.Compiled]]:
    """The stand-in for torch-neuronx; what it compiled, in order."""
    with stand_in.installed() as records:
        yield records

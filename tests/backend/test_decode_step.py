"""A whole decode step compiles to one graph and equals eager, step after step."""

from __future__ import annotations

import pytest
import torch

from .decode_step import DecodeStep, step_arguments
from .harness import E8, F8, assert_same
from .stand_in import Compiled


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_decode_steps(mode: type, compiled: list[Compiled]) -> None:
    eager, traced = DecodeStep(), DecodeStep()
    run = torch.compile(traced, backend="deepinfer_neuron", fullgraph=True, dynamic=False)
    with mode():
        for step in range(4):
            assert_same(eager(*step_arguments(step)), run(*step_arguments(step)))
            assert_same((eager.cache, eager.scales), (traced.cache, traced.scales))
    (record,) = compiled
    assert (len(record.aot_graphs), record.calls, len(record.mutated)) == (1, 4, 2)
    assert (traced.cache.dtype, traced.scales.dtype) == (F8, E8)
    assert traced.cache.float().abs().sum() > 0

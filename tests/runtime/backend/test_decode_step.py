"""Whole decode steps compile to one graph and equal eager, step after step."""

from __future__ import annotations

from pathlib import Path

import example_block
import pytest
import torch
from make_checkpoint import SampleOptions, write_checkpoint

from tests.runtime.backend.decode_step import DecodeStep, step_arguments
from tests.runtime.backend.harness import E8, F8, assert_same
from tests.runtime.backend.stand_in import Compiled


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


@pytest.mark.parametrize(("layer", "written"), [(0, 1), (2, 4)])
def test_the_example_block(tmp_path: Path, compiled: list[Compiled], layer: int, written: int) -> None:
    """A miniature V4.1 layer without and with compression, filled from a sample checkpoint."""
    source = tmp_path / "checkpoint"
    write_checkpoint(source, SampleOptions(hidden=640, layers=4, experts=2))
    with torch.no_grad():
        block, steps = example_block.live_block(source, layer), 3
        run = torch.compile(block, backend="deepinfer_neuron", fullgraph=True, dynamic=False)
        eager, traced = (example_block.caches_of({layer: block})[layer] for _ in range(2))
        streams = example_block.streams_of_tokens(source)
        for step in range(steps):
            position = torch.tensor([step], dtype=torch.int32)
            one = streams[step : step + 1]
            assert_same(block(one, eager, position), run(one, traced, position))
            assert_same(eager, traced)
    (record,) = compiled
    assert (len(record.aot_graphs), record.calls, len(record.mutated)) == (1, steps, written)

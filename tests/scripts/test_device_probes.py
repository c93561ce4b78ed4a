"""The probes for a device run here too, hold, and say what to do where one does not."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels.cases import ON_SIMULATOR

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "device_probes.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_probes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["device_probes"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(ON_SIMULATOR, reason="what the simulator says of a probe is a finding, not a test")
def test_every_probe_holds_in_the_emulator(script: ModuleType) -> None:
    for probe in script.probes():
        good, line = script.verdict(probe, script._on_host)
        assert good, line
        assert line.startswith("holds")


def test_a_wrong_result_and_a_refusal_name_the_way_around(script: ModuleType) -> None:
    probe = script.probes()[1]
    good, line = script.verdict(replace(probe, expected=torch.zeros_like(probe.expected)), script._on_host)
    assert not good
    assert line.startswith("WRONG   stepped_stationary: ")
    assert probe.otherwise in line
    good, line = script.verdict(replace(probe, arguments=probe.arguments[::-1]), script._on_host)
    assert not good
    assert line.startswith("REFUSED stepped_stationary: ")

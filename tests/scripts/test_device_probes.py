"""The probes for a device run here too, hold, and say what to do where one does not."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from nki_emulator.lint import lint_file

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


on_emulator = pytest.mark.skipif(ON_SIMULATOR, reason="what the simulator says of a probe is a finding, not a test")


@on_emulator
def test_every_probe_holds_in_the_emulator(script: ModuleType) -> None:
    lines = [script.verdict(probe, script._on_host) for probe in script.probes()]
    lines += [script.rate_verdict(probe, script._on_host) for probe in script.rates()]
    assert all(good and line.startswith("holds") for good, line in lines), lines


def test_probes_use_the_python_that_the_compiler_takes() -> None:
    for path in sorted(SCRIPT.parent.glob("probe_kernels/*.py")):
        assert not lint_file(path), path


@on_emulator
def test_every_verdict_fails_where_one_value_is_wrong(script: ModuleType) -> None:
    for probe in script.probes():

        def corrupted(probe: Any) -> Any:
            found, _ = script._on_host(probe)
            flat = found.clone().reshape(-1)
            place = 0 if probe.free is None else int((~probe.free).reshape(-1).int().argmax())
            flat[place] = 0 if probe.expected.reshape(-1)[place] == 1 else 1
            return flat.reshape(found.shape), None

        good, line = script.verdict(probe, corrupted)
        assert not good, line
        assert line.startswith(f"WRONG   {probe.kernel.__name__}: 1 of "), line
        assert line.endswith(probe.otherwise)


@on_emulator
def test_what_a_probe_leaves_free_may_be_anything(script: ModuleType) -> None:
    free = [probe for probe in script.probes() if probe.free is not None]
    assert free
    for probe in free:
        found, _ = script._on_host(probe)
        found[probe.free] = 12345.0
        assert probe.differences(found) == 0


def test_differences_know_nan_infinity_shapes_and_tolerance(script: ModuleType) -> None:
    expected = torch.tensor([1.0, float("nan"), float("inf"), 100.0])
    probe = replace(script.probes()[0], expected=expected, tolerance=0.01)
    assert probe.differences(expected.clone()) == 0
    assert probe.differences(torch.tensor([1.005, float("nan"), float("inf"), 100.9])) == 0
    assert probe.differences(torch.tensor([1.02, 0.0, float("-inf"), float("nan")])) == 4
    assert probe.differences(torch.tensor([1.0, float("nan"), 3e38, 102.0])) == 2
    assert probe.differences(expected[:2]) == 4


def test_a_wrong_result_and_a_refusal_name_the_way_around(script: ModuleType) -> None:
    probe = script.probes()[1]
    good, line = script.verdict(replace(probe, expected=torch.zeros_like(probe.expected)), script._on_host)
    assert not good
    assert line.startswith("WRONG   stepped_stationary: ")
    assert probe.otherwise in line
    good, line = script.verdict(replace(probe, arguments=probe.arguments[::-1]), script._on_host)
    assert not good
    assert line.startswith("REFUSED stepped_stationary: ")


@pytest.mark.parametrize(("share", "expected"), [(0.9, "holds"), (1.1, "SLOW ")])
def test_a_rate_is_the_difference_of_two_times(script: ModuleType, share: float, expected: str) -> None:
    for rate in script.rates():

        def timed(probe: Any, rate: Any = rate) -> Any:
            seconds = 1e-4 + (share * rate.extra * rate.limit if probe is rate.more else 0.0)
            return probe.expected, seconds

        good, line = script.rate_verdict(rate, timed)
        assert good == (expected == "holds")
        assert line.startswith(expected)
        assert rate.what in line


def test_a_rate_of_a_wrong_kernel_is_no_rate(script: ModuleType) -> None:
    rate = script.rates()[0]
    good, line = script.rate_verdict(rate, lambda probe: (torch.zeros_like(probe.expected), 1e-4))
    assert not good
    assert line.startswith("WRONG")

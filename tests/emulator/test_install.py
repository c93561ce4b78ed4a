"""Which `nki` kernels get: ours, AWS's, and never PyPI's placeholder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import nki_emulator
import numpy as np
import pytest
from nki_emulator import EmulatorError, Options, RuleError, rules, run, to_numpy, to_torch
from nki_emulator.install import NAMES
from nki_emulator.jit import jit

from tests.emulator.support import load, store

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=t)
    return out
"""

SIMULATOR = """
import os
class Kernel:
    def __init__(self, function, grid=None):
        self.function, self.grid = function, grid
    def __getitem__(self, grid):
        return Kernel(self.function, grid)
def jit(function):
    return Kernel(function)
def simulate(kernel):
    def simulated(x):
        assert os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn2"
        return x * 2, kernel.grid
    return simulated
"""


@pytest.fixture
def no_nki(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nobody has imported any `nki` yet; what it had is put back afterwards."""
    saved = {name: module for name, module in sys.modules.items() if name == "nki" or name.startswith("nki.")}
    for name in saved:
        del sys.modules[name]
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name == "nki" or name.startswith("nki.")]:
        del sys.modules[name]
    sys.modules.update(saved)


def package(root: Path, init: str, *modules: str) -> None:
    """A package named nki in `root`."""
    folder = root / "nki"
    folder.mkdir()
    (folder / "__init__.py").write_text(init)
    for module in modules:
        (folder / f"{module}.py").write_text("")


def kernel_module(root: Path) -> Any:
    """A freshly imported module with one kernel."""
    path = root / "a_kernel.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("a_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("no_nki")
def test_the_emulator_takes_the_place_of_a_missing_package(tmp_path: Path) -> None:
    if nki_emulator.real_nki() is not None:
        pytest.skip("AWS's nki is installed here")
    assert nki_emulator.install() == "emulator"
    assert nki_emulator.install() == "emulator"
    result = run(kernel_module(tmp_path).double, np.ones((4, 4), np.float32))
    assert result.backend == "emulator"
    np.testing.assert_array_equal(result.output, np.full((4, 4), 2))
    assert importlib.util.find_spec("nki") is not None
    nki_emulator.uninstall()
    assert not any(name in sys.modules for name in NAMES)


@pytest.mark.usefixtures("no_nki")
def test_a_block_leaves_no_trace() -> None:
    if nki_emulator.real_nki() is not None:
        pytest.skip("AWS's nki is installed here")
    with nki_emulator.installed() as backend:
        assert backend == "emulator"
        with nki_emulator.installed():
            pass
        assert "nki" in sys.modules
    assert "nki" not in sys.modules


@pytest.mark.usefixtures("no_nki")
def test_the_placeholder_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "raise RuntimeError('install from the Neuron index')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert nki_emulator.real_nki() is None
    assert nki_emulator.install() == "emulator"


@pytest.mark.usefixtures("no_nki")
def test_an_empty_package_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "", "isa", "language")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert nki_emulator.real_nki() is None
    assert "nki" not in sys.modules


@pytest.mark.usefixtures("no_nki")
def test_a_real_package_is_left_in_place_and_simulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, SIMULATOR, "isa", "language")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert nki_emulator.install() == "simulator"
    nki_emulator.uninstall()
    assert "nki" in sys.modules
    kernel = kernel_module(tmp_path).double
    result = run(kernel, np.ones((2, 2), np.float32), grid=2)
    assert (result.backend, result.instructions) == ("simulator", None)
    np.testing.assert_array_equal(result.outputs[0], np.full((2, 2), 2))
    assert result.outputs[1] == 2
    with pytest.raises(EmulatorError, match="no emulator options"):
        run(kernel, np.ones((2, 2), np.float32), options=Options())


@pytest.mark.usefixtures("no_nki")
def test_the_simulator_is_told_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, SIMULATOR, "isa", "language")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "")
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    nki_emulator.install()
    run(kernel_module(tmp_path).double, np.ones((2, 2), np.float32))
    assert os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn2"


def test_something_that_is_no_kernel_is_refused() -> None:
    if nki_emulator.real_nki() is not None:
        pytest.skip("AWS's nki is installed here")
    with pytest.raises(EmulatorError, match="not an emulated kernel"):
        run(print, np.ones((2, 2)))


@pytest.mark.usefixtures("no_nki")
def test_modules_show_only_documented_names() -> None:
    if nki_emulator.real_nki() is not None:
        pytest.skip("AWS's nki is installed here")
    nki_emulator.install()
    nl, nisa = importlib.import_module("nki.language"), importlib.import_module("nki.isa")
    for module, name in ((nl, "np"), (nl, "Tensor"), (nisa, "rules"), (nisa, "Engine")):
        with pytest.raises(RuleError) as caught:
            getattr(module, name)
        assert caught.value.rule is rules.NOT_MODELLED
        assert not hasattr(module, name)
    assert nl.tile_size.pmax == 128
    assert nl.float8_e4m3.itemsize == 1


# torch


def test_torch_tensors_go_in_and_come_out() -> None:
    torch = pytest.importorskip("torch")

    @jit
    def copy(x: Any) -> Any:
        return store(load(x))

    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.int8, torch.int32):
        tensor = (torch.arange(64).reshape(4, 16) - 8).to(dtype)
        output = run(copy, tensor).output
        assert output.dtype is dtype
        assert torch.equal(output, tensor)


def test_torch_and_numpy_agree_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    for torch_type, numpy_type in (
        (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
        (torch.float8_e5m2, ml_dtypes.float8_e5m2),
        (torch.bfloat16, ml_dtypes.bfloat16),
    ):
        array = to_numpy(codes.view(torch_type))
        assert array.dtype == numpy_type
        np.testing.assert_array_equal(array.view(np.uint8), np.arange(256))
    assert torch.equal(to_torch(to_numpy(codes.view(torch.bfloat16))).view(torch.uint8), codes)
    kernel, e4m3fn = jit(lambda x: x), codes.view(torch.float8_e4m3fn)
    with pytest.raises(RuleError) as caught:
        run(kernel, e4m3fn)
    assert caught.value.rule is rules.NO_FN_TENSOR

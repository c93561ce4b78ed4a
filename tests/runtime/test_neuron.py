"""What is found of AWS's packages, of the chip, and of wrap_nki."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

from deepinfer_prep.errors import NeuronUnavailableError
from deepinfer_prep.runtime import neuron

PLACEHOLDERS = [("torch-neuronx", "1.0"), ("neuronx-cc", "1.0.post1"), ("nki", "0.0.1")]


def install(folder: Path, name: str, version: str, summary: str) -> None:
    """A distribution's metadata, and a module that raises as the placeholders do."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n{summary}\n")
    module = folder / neuron._MODULES[name]
    module.mkdir()
    (module / "__init__.py").write_text(f"raise ImportError({summary!r})\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder, alone on sys.path: nothing but this test's packages can be found."""
    for name in (*neuron._MODULES.values(), "libtorch_neuronx_lite", "vllm_neuron"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    importlib.invalidate_caches()
    return folder


@pytest.mark.parametrize(("name", "version"), PLACEHOLDERS)
def test_placeholder_is_told_from_the_package(site, name, version):
    install(site, name, version, "WRONG PACKAGE. Please install the package from Neuron Repository")
    found = neuron.package(name)
    assert found == neuron.Package(name, "placeholder", version)
    with pytest.raises(NeuronUnavailableError, match=f"{name} {version} is an empty placeholder.*pip uninstall {name}"):
        neuron.require(name)


@pytest.mark.parametrize("name", [name for name, _ in PLACEHOLDERS])
def test_absent_and_installed(site, name):
    absent = neuron.package(name)
    assert absent.state == "absent"
    assert str(absent) == f"{name} is not installed"
    with pytest.raises(NeuronUnavailableError, match=f"{name} is not installed. Install {name} from AWS's own"):
        neuron.require(name)
    install(site, name, "2.21.1", "AWS Neuron")
    importlib.invalidate_caches()
    assert neuron.package(name) == neuron.Package(name, "installed", "2.21.1")
    assert str(neuron.package(name)) == f"{name} 2.21.1"
    neuron.require(name)


def test_module_without_metadata_counts_as_installed(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "nki", types.ModuleType("nki"))
    assert neuron.package("nki") == neuron.Package("nki", "installed")


def test_chip_sources_in_order(monkeypatch):
    assert neuron.chip() is None
    assert neuron.computes_in_e4m3()
    neuron._PRODUCT_NAME.write_text("trn2.48xlarge\n")
    assert neuron.chip() == "trn2"
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1 '--target=trn3'")
    assert neuron.chip() == "trn3"
    assert not neuron.computes_in_e4m3()
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "TRN1")
    assert neuron.chip() == "trn1"
    assert neuron.computes_in_e4m3()


@pytest.mark.parametrize(
    ("product", "chip", "e4m3", "cores"),
    [
        ("trn1.32xlarge", "trn1", True, 1),
        ("trn1n.32xlarge", "trn1n", True, 1),
        ("inf2.xlarge", "inf2", True, 1),
        ("trn2u.48xlarge", "trn2u", True, 2),
        ("trn3.48xlarge", "trn3", False, 2),
        ("trn4.1xlarge", "trn4", False, 2),
        ("Standard PC (i440FX + PIIX, 1996)", None, True, 2),
    ],
)
def test_machines(product, chip, e4m3, cores):
    neuron._PRODUCT_NAME.write_text(product)
    assert neuron.chip() == chip
    assert neuron.computes_in_e4m3() is e4m3
    assert neuron.physical_cores() == cores


def test_logical_core_size_is_the_users_word(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert neuron.physical_cores() == 1


def test_tensors_elsewhere_are_not_on_a_neuron_device():
    assert not neuron.holds(torch.empty(1))
    assert not neuron.holds(torch.empty(1, device="meta"))


@pytest.mark.parametrize("home", neuron._WRAP_NKI_MODULES)
def test_wrap_nki_is_found_in_every_release_and_nowhere_else(site, monkeypatch, home):
    with pytest.raises(NeuronUnavailableError, match="torch-neuronx is not installed"):
        neuron.wrap_nki()
    parts = home.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
    sys.modules[home].wrap_nki = len
    assert neuron.wrap_nki() is len


def test_release_without_wrap_nki_says_what_is_needed(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    with pytest.raises(
        NeuronUnavailableError, match=r"gives no wrap_nki.*torch_neuronx: no such name; .*Install torch-neuronx 2\.10"
    ):
        neuron.wrap_nki()

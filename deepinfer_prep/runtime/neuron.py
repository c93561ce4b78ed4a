"""What there is of AWS Neuron on this machine: packages, empty placeholders, the chip, tensors on it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

import torch

from deepinfer_prep.errors import NeuronUnavailableError
from deepinfer_prep.runtime import cc_flags

DEVICE = "neuron"
"""The name of TorchNeuron's device type."""

_MODULES = {"torch-neuronx": "torch_neuronx", "neuronx-cc": "neuronxcc", "nki": "nki"}
_PLACEHOLDER_MARK = "WRONG PACKAGE"
"""Stands in the metadata of the packages of these names that hold nothing but a line that raises."""

_E4M3_CHIPS = ("trn1", "trn2", "inf2")
_PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
_WRAP_NKI_MODULES = (
    "torch_neuronx.nki_hop",
    "torch_neuronx",
    "libtorch_neuronx_lite.nki.nki_hop",
    "vllm_neuron.nki.nki_hop",
)


@dataclass(frozen=True, slots=True)
class Package:
    """One of AWS's packages as found here, without importing it."""

    name: str
    """Distribution name, such as "torch-neuronx"."""
    state: Literal["installed", "placeholder", "absent"]
    version: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version or 'unknown version'}" if self.state == "installed" else self.problem

    @property
    def problem(self) -> str:
        """What is wrong with it, in a few words; empty if it is installed."""
        if self.state == "placeholder":
            return f"{self.name} {self.version} is an empty placeholder"
        return f"{self.name} is not installed" if self.state == "absent" else ""


def packages() -> tuple[Package, ...]:
    """All of AWS's packages that the runtime can make use of."""
    return tuple(package(name) for name in _MODULES)


def package(name: str) -> Package:
    """Look one package up.

    Args:
        name: "torch-neuronx", "neuronx-cc" or "nki".
    """
    module = _MODULES[name]
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        here = module in sys.modules or util.find_spec(module) is not None
        return Package(name, "installed" if here else "absent")
    if module not in sys.modules and _PLACEHOLDER_MARK in str(distribution.metadata):
        return Package(name, "placeholder", distribution.version)
    return Package(name, "installed", distribution.version)


def require(name: str) -> None:
    """Check that a package is there before importing it.

    Raises:
        NeuronUnavailableError: it is absent or a placeholder; the message says what to install.
    """
    found = package(name)
    if found.state != "installed":
        raise NeuronUnavailableError(f"{found.problem}. {remedy(found)}")


def remedy(found: Package) -> str:
    """What to do about a package that is absent or a placeholder."""
    first = f"Run `pip uninstall {found.name}`, then install" if found.state == "placeholder" else "Install"
    return (
        f"{first} {found.name} from AWS's own package index, as the Neuron SDK's set-up guide says; the package of "
        "that name on the default index is an empty placeholder that raises when it is imported."
    )


def chip() -> str | None:
    """The Neuron generation that graphs are compiled for, such as "trn2"; None where nothing says it.

    `NEURON_PLATFORM_TARGET_OVERRIDE` decides, then `--target` in `NEURON_CC_FLAGS`, then the instance type
    that the machine's firmware states.
    """
    stated = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "").strip()
    stated = stated or cc_flags.option_value(os.environ.get("NEURON_CC_FLAGS", ""), "--target") or ""
    if stated:
        return stated.lower()
    try:
        instance = _PRODUCT_NAME.read_text().strip().lower().partition(".")[0]
    except OSError:
        return None
    return instance if instance.startswith(("trn", "inf")) else None


def computes_in_e4m3() -> bool:
    """Whether the chip reads fp8 bytes as e4m3, up to 240; so until something says that it is a later one."""
    found = chip()
    return found is None or found.startswith(_E4M3_CHIPS)


def physical_cores() -> int:
    """How many physical cores one logical core has: `NEURON_LOGICAL_NC_CONFIG`, else 1 on trn1 and 2 on later chips."""
    stated = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "").strip()
    if stated.isdigit():
        return int(stated)
    return 1 if (chip() or "").startswith(("trn1", "inf2")) else 2


def holds(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives on a Neuron device."""
    return tensor.device.type == DEVICE


def wrap_nki() -> Callable[[Any], Any]:
    """The function that makes an NKI kernel callable from PyTorch, wherever this release keeps it.

    Raises:
        NeuronUnavailableError: no installed package has it.
    """
    seen = []
    for name in _WRAP_NKI_MODULES:
        try:
            found = getattr(importlib.import_module(name), "wrap_nki", None)
        except ImportError as error:
            seen.append(f"{name}: {error}")
            continue
        if found is not None:
            return found  # type: ignore[no-any-return]
        seen.append(f"{name}: no such name")
    require("torch-neuronx")
    raise NeuronUnavailableError(
        f"{package('torch-neuronx')} gives no wrap_nki, which the NKI kernels need ({'; '.join(seen)}). Install "
        "torch-neuronx 2.10 or later, or set DEEPINFER_NEURON_NKI_GEMM=0, DEEPINFER_NEURON_NKI_HC=0, "
        "DEEPINFER_NEURON_NKI_NORM=0 and DEEPINFER_NEURON_NKI_ATTN=0 to run without them."
    )

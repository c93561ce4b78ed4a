"""Every test here runs as if no Neuron variable were set and the machine had no chip, whatever is true outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_prep.runtime import neuron
from tests.runtime.fake_neuron import fake_neuron

__all__ = ["fake_neuron"]

_VARIABLES = (
    "DEEPINFER_NEURON_FP8_MAX",
    "DEEPINFER_NEURON_NKI_GEMM",
    "DEEPINFER_NEURON_BQ_2CORE",
    "DEEPINFER_NEURON_NKI_HC",
    "DEEPINFER_NEURON_NKI_NORM",
    "DEEPINFER_NEURON_NKI_ATTN",
    "NEURON_CC_FLAGS",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "UNSAFE_FP8FNCAST",
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in _VARIABLES:
        # Set first, so that the value outside comes back even where the code under test sets it anew.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(neuron, "_PRODUCT_NAME", tmp_path / "product_name")

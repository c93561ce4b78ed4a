"""The environment variables of serving code."""

from __future__ import annotations

import pytest

from deepinfer_prep.errors import PrepError
from deepinfer_prep.runtime import settings


def test_defaults():
    assert settings.fp8_max() == 224
    assert not settings.leaves_e4m3fn()
    assert settings.gemm_kernels()
    assert settings.two_core_gemm()
    assert settings.hc_kernels()


@pytest.mark.parametrize(
    ("text", "value", "left_alone"), [("224", 224, False), ("240.0", 240, False), (" 448 ", 448, True)]
)
def test_fp8_max_is_read_when_asked(monkeypatch, text, value, left_alone):
    monkeypatch.setenv("DEEPINFER_NEURON_FP8_MAX", text)
    assert settings.fp8_max() == value
    assert settings.leaves_e4m3fn() is left_alone


@pytest.mark.parametrize("text", ["0", "200", "256", "447", "nan", "inf", "-224", "half"])
def test_unusable_fp8_max_is_refused(monkeypatch, text):
    monkeypatch.setenv("DEEPINFER_NEURON_FP8_MAX", text)
    with pytest.raises(PrepError, match=r"DEEPINFER_NEURON_FP8_MAX is .*Set it to 224"):
        settings.fp8_max()


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("DEEPINFER_NEURON_NKI_GEMM", settings.gemm_kernels),
        ("DEEPINFER_NEURON_BQ_2CORE", settings.two_core_gemm),
        ("DEEPINFER_NEURON_NKI_HC", settings.hc_kernels),
        ("DEEPINFER_NEURON_NKI_NORM", settings.norm_kernels),
        ("DEEPINFER_NEURON_NKI_ATTN", settings.attention_kernels),
    ],
)
def test_switches(monkeypatch, name, switch):
    for text, on in (("0", False), (" 0 ", False), ("1", True), ("", True)):
        monkeypatch.setenv(name, text)
        assert switch() is on

"""configure_compiler and describe, as a server calls them."""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import sys

import pytest

from deepinfer_prep.errors import PrepError
from deepinfer_prep.runtime import compiler, fp8, neuron
from deepinfer_prep.runtime.cc_flags import FP8_OPTION, KEY

OPTION = f"{KEY}={FP8_OPTION}"


def test_empty_environment():
    fp8.configure_compiler()
    assert os.environ["UNSAFE_FP8FNCAST"] == "1"
    assert os.environ["NEURON_CC_FLAGS"] == OPTION


def test_second_call_changes_nothing(monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", f"-O1 {KEY}='--a --b' --lnc=2")
    fp8.configure_compiler()
    before = dict(os.environ)
    fp8.configure_compiler()
    assert dict(os.environ) == before


def test_flags_survive_both_launchers(monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", f"--lnc=2 {FP8_OPTION} {KEY}='{FP8_OPTION}' -O1")
    fp8.configure_compiler()
    flags = os.environ["NEURON_CC_FLAGS"]
    assert flags.split() == shlex.split(flags) == ["--lnc=2", "-O1", OPTION]


def test_value_that_one_launcher_cannot_carry_is_logged(monkeypatch, caplog):
    monkeypatch.setenv("NEURON_CC_FLAGS", f"{KEY}=--verify-hlo=true")
    fp8.configure_compiler()
    assert shlex.split(os.environ["NEURON_CC_FLAGS"]) == [f"{KEY}=--verify-hlo=true {FP8_OPTION}"]
    assert "TorchNeuron's launcher splits on whitespace" in caplog.text


@pytest.mark.parametrize("chip", ["trn3", "trn3pds98", "trn4"])
def test_never_on_later_chips(monkeypatch, caplog, chip):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)
    fp8.configure_compiler()
    assert "NEURON_CC_FLAGS" not in os.environ
    assert "UNSAFE_FP8FNCAST" not in os.environ
    assert not caplog.records
    monkeypatch.setenv("NEURON_CC_FLAGS", OPTION)
    fp8.configure_compiler()
    assert os.environ["NEURON_CC_FLAGS"] == OPTION
    assert "NCC_EOCP001" in caplog.text


def test_target_in_the_flags_counts(monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--target=trn3 -O1")
    fp8.configure_compiler()
    assert os.environ["NEURON_CC_FLAGS"] == "--target=trn3 -O1"


def test_not_when_e4m3fn_is_left_alone(monkeypatch):
    monkeypatch.setenv("DEEPINFER_NEURON_FP8_MAX", "448")
    fp8.configure_compiler()
    assert "NEURON_CC_FLAGS" not in os.environ
    assert "UNSAFE_FP8FNCAST" not in os.environ
    assert fp8.describe().startswith("fp8 range 448 (e4m3fn left alone)")


def test_users_cast_setting_stays(monkeypatch, caplog):
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "yes")
    fp8.configure_compiler()
    assert os.environ["UNSAFE_FP8FNCAST"] == "yes"
    assert not caplog.records
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "0")
    fp8.configure_compiler()
    assert os.environ["UNSAFE_FP8FNCAST"] == "0"
    assert "NKI kernels will refuse e4m3fn tensors" in caplog.text


def test_unreadable_flags_stop_with_a_sentence(monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", f"{KEY}='--a")
    with pytest.raises(PrepError, match="not closed"):
        fp8.configure_compiler()
    assert os.environ["NEURON_CC_FLAGS"] == f"{KEY}='--a"


def test_placeholders_are_reported_and_absent_packages_are_not(tmp_path, monkeypatch, caplog):
    fp8.configure_compiler()
    assert not caplog.records
    info = tmp_path / "torch_neuronx-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 1.0\n\nWRONG PACKAGE.\n")
    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with caplog.at_level(logging.WARNING):
        fp8.configure_compiler()
    assert "torch-neuronx 1.0 is an empty placeholder. Run `pip uninstall torch-neuronx`" in caplog.text
    assert "torch-neuronx 1.0 is an empty placeholder" in fp8.describe()


def test_describe_is_one_line_with_all_there_is_to_know(monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1\n--lnc=2")
    neuron._PRODUCT_NAME.write_text("trn2.48xlarge")
    fp8.configure_compiler()
    line = compiler.describe()
    assert "\n" not in line
    assert "fp8 range 224 (halved weights, doubled scales); chip trn2; UNSAFE_FP8FNCAST=1" in line
    assert repr(f"-O1 --lnc=2 {OPTION}") in line
    assert "torch-neuronx" in line
    assert "neuronx-cc" in line

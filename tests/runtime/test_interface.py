"""The names that serving code imports, and what importing them costs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_prep import runtime
from deepinfer_prep.runtime import fp8, gemm, mhc

NAMES = {
    fp8: ["FP8_MAX", "configure_compiler", "halve_e4m3fn_bytes", "rescale_fp8_weights", "describe"],
    gemm: ["prepare_model", "supported", "has_kernel", "gemm", "linear_qdq", "linear_qdq_raw", "linear_qdq_gated"],
    mhc: [
        "expand",
        "expand_supported",
        "pre_apply_mix",
        "post",
        "split_fn",
        "prepare_model",
        "mixes",
        "mixes_supported",
        "pre_big_fuse",
    ],
}

SIGNATURES = {
    fp8.rescale_fp8_weights: ["model"],
    gemm.supported: ["a", "b", "k", "n"],
    gemm.gemm: ["a", "sfa", "b", "d", "group"],
    gemm.linear_qdq: ["x", "w", "group"],
    gemm.linear_qdq_raw: ["x", "weight_u8", "scale"],
    gemm.linear_qdq_gated: ["x", "w", "group", "flag"],
    gemm.has_kernel: ["w"],
    gemm.prepare_model: ["model"],
    mhc.expand: ["hidden", "hc_mult"],
    mhc.pre_apply_mix: ["x", "mix"],
    mhc.post: ["x", "residual", "post", "comb"],
    mhc.split_fn: ["fn"],
    mhc.mixes: ["residual", "fn", "scale", "base"],
    mhc.mixes_supported: ["residual", "norm_eps", "pre_eps", "sinkhorn_eps", "post_mult_value", "sinkhorn_repeat"],
    mhc.pre_big_fuse: ["residual", "fn", "scale", "base"],
}


def test_names_are_there():
    for module, names in NAMES.items():
        assert set(names) <= set(module.__all__)
        for name in names:
            assert getattr(module, name) is not None


def test_signatures():
    for function, parameters in SIGNATURES.items():
        assert list(inspect.signature(function).parameters) == parameters


def test_fp8_max_follows_the_environment(monkeypatch):
    assert fp8.FP8_MAX == 224
    monkeypatch.setenv("DEEPINFER_NEURON_FP8_MAX", "448")
    assert fp8.FP8_MAX == 448


@pytest.mark.parametrize("module", [runtime, fp8])
def test_other_names_are_attribute_errors(module):
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


def test_every_public_name_resolves():
    for name in runtime.__all__:
        assert getattr(runtime, name) is not None
        assert name in dir(runtime)


def test_importing_the_package_needs_no_torch():
    code = "import sys, deepinfer_prep.runtime; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["runtime", "runtime.load", "runtime.deepinfer.fp8"])
def test_without_torch_importing_the_runtime_names_what_to_install(module):
    code = f"import sys; sys.modules['torch'] = None; import deepinfer_prep.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "`pip install 'deepinfer-prep[runtime]'`" in done.stderr.splitlines()[-1]


def test_a_clone_on_the_path_says_what_to_do(tmp_path):
    clone = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(clone)!r}); import deepinfer_prep.runtime"
    # -S hides what is installed in editable form; the libraries stay reachable.
    library = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": library},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "run `pip install -e .` in the clone" in done.stderr.splitlines()[-1]

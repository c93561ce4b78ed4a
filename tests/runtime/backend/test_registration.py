"""How torch finds the backend, what it hands on, and what it says where torch-neuronx is missing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed

import deepinfer_prep
from deepinfer_prep.errors import BackendOptionError, NeuronUnavailableError
from tests.runtime.backend.harness import F8, check, fp8, run_compiled
from tests.runtime.backend.stand_in import Compiled

PROGRAM = """
import sys, torch
assert "deepinfer_neuron" in torch._dynamo.list_backends()
assert not any(name.startswith("deepinfer_prep") for name in sys.modules)
x = torch.ones(4).to(torch.float8_e4m3fn)
run = torch.compile(lambda x: x.float() * 2, backend="deepinfer_neuron", options={"base_backend": "eager"})
assert torch.equal(run(x), torch.full((4,), 2.0))
print("fine")
"""


def test_found_by_its_entry_point() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not used the backend: not imported, found by torch, not yet loaded."""
    registry.list_backends()
    (entry,) = entry_points(group="torch_dynamo_backends", name="deepinfer_neuron")
    monkeypatch.setattr(registry, "_BACKENDS", {**registry._BACKENDS, "deepinfer_neuron": entry})
    loaded = {name: found for name, found in registry._COMPILER_FNS.items() if name != "deepinfer_neuron"}
    monkeypatch.setattr(registry, "_COMPILER_FNS", loaded)
    before = _take_modules()
    yield
    _take_modules()
    sys.modules.update(before)
    deepinfer_prep.runtime = before["deepinfer_prep.runtime"]


def _take_modules() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name.startswith("deepinfer_prep.runtime")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.mark.parametrize("imported", ["deepinfer_prep.runtime", "deepinfer_prep.runtime.backend.compile", None])
@pytest.mark.parametrize("reloaded", [True, False])
@pytest.mark.usefixtures("fresh")
def test_the_order_of_imports_does_not_matter(imported: str | None, reloaded: bool) -> None:
    if imported is not None:
        importlib.import_module(imported)
    check(lambda x: x.float(), lambda: (fp8(4),), options={"base_backend": "eager"})
    if reloaded:
        importlib.reload(importlib.import_module("deepinfer_prep.runtime.backend"))
        torch._dynamo.reset()
        check(lambda x: x.float() * 2, lambda: (fp8(4),), options={"base_backend": "eager"})


@pytest.mark.usefixtures("fresh")
def test_importing_the_package_does_not_import_the_pass() -> None:
    importlib.import_module("deepinfer_prep.runtime.backend")
    assert "deepinfer_prep.runtime.backend.compile" not in sys.modules


class TestOptions:
    def test_they_are_handed_on(self, compiled: list[Compiled]) -> None:
        run_compiled(lambda x: x.float(), (fp8(4),), options={"model_name": "V4", "dump_dir": None})
        assert compiled[0].options == {"model_name": "V4", "dynamic": False}

    def test_without_options(self, compiled: list[Compiled]) -> None:
        run_compiled(lambda x: x.float(), (fp8(4),))
        assert (compiled[0].options, compiled[0].mode) == ({"dynamic": False}, "default")

    def test_the_mode_is_handed_on(self, compiled: list[Compiled]) -> None:
        run_compiled(lambda x: x.float(), (fp8(4),), mode="max-autotune")
        assert compiled[0].mode == "max-autotune"

    def test_graphs_without_fp8_go_the_same_way(self, compiled: list[Compiled]) -> None:
        run_compiled(lambda x: x * 2, (torch.ones(4),), options={"model_name": "V4"})
        assert compiled[0].options["model_name"] == "V4"

    @pytest.mark.parametrize("base", ["eager", "aot_eager"])
    def test_another_base_backend(self, base: str, compiled: list[Compiled]) -> None:
        def program(x: torch.Tensor, cache: torch.Tensor) -> Any:
            cache[1:3] = (x.float() * 2).to(F8)
            return cache.t().bfloat16(), cache[:2]

        check(program, lambda: (fp8(2, 8, scale=1), fp8(4, 8)), calls=2, options={"base_backend": base})
        assert compiled == []

    def test_inductor_takes_its_own_options(self) -> None:
        """On a graph of views, for which it generates no code to be compiled."""
        options = {"base_backend": "inductor", "max_autotune": False}
        check(lambda x: (x.t(), x[1:].view(torch.uint8)), lambda: (fp8(4, 8),), options=options)
        with pytest.raises(BackendCompilerFailed, match="no_such_option"):
            run_compiled(lambda x: x[2:], (fp8(4),), options={**options, "no_such_option": 1})

    @pytest.mark.skipif("DEEPINFER_EXHAUSTIVE" not in os.environ, reason="set DEEPINFER_EXHAUSTIVE=1: compiles C++")
    def test_inductor(self) -> None:
        def program(x: torch.Tensor, cache: torch.Tensor) -> Any:
            cache[1:3] = (x.float() * 2).to(F8)
            return cache.t().bfloat16(), cache[:2]

        check(program, lambda: (fp8(2, 8, scale=1), fp8(4, 8)), calls=2, options={"base_backend": "inductor"})

    def test_a_callable(self) -> None:
        seen: list[Any] = []

        def base(gm: Any, examples: list[Any], **keywords: Any) -> Any:
            seen.append((examples, keywords))
            return gm.forward

        run_compiled(lambda x: x.float(), (fp8(4),), options={"base_backend": base, "key": 1})
        (examples, keywords) = seen[0]
        assert [example.dtype for example in examples] == [torch.uint8]
        assert keywords == {"options": {"key": 1}}

    def test_from_the_environment(self, monkeypatch: pytest.MonkeyPatch, compiled: list[Compiled]) -> None:
        monkeypatch.setenv("DEEPINFER_NEURON_BASE_BACKEND", "aot_eager")
        check(lambda x: x.float(), lambda: (fp8(4),))
        assert compiled == []

    @pytest.mark.parametrize("name", ["no_such_backend", "deepinfer_neuron"])
    def test_a_name_that_is_no_base(self, name: str) -> None:
        with pytest.raises(BackendCompilerFailed) as caught:
            run_compiled(lambda x: x.float(), (fp8(4),), options={"base_backend": name})
        assert isinstance(caught.value.inner_exception, BackendOptionError)
        assert "aot_eager" in str(caught.value)

    def test_a_base_of_the_wrong_type(self) -> None:
        with pytest.raises(BackendCompilerFailed, match="or a callable, found 3"):
            run_compiled(lambda x: x.float(), (fp8(4),), options={"base_backend": 3})


class TestWithoutNeuron:
    def refusal(self) -> str:
        with pytest.raises(BackendCompilerFailed) as caught:
            run_compiled(lambda x: x.float(), (fp8(4),))
        assert isinstance(caught.value.inner_exception, NeuronUnavailableError)
        return str(caught.value)

    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch_neuronx", None)
        monkeypatch.delitem(sys.modules, "torch_neuronx.neuron_dynamo_backend")
        monkeypatch.delitem(sys.modules, "torch_neuronx.neuron_dynamo_backend.backend")
        message = self.refusal()
        assert "torch-neuronx, which could not be imported" in message
        assert '{"base_backend": "aot_eager"}' in message

    def test_a_placeholder_that_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Placeholder(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                raise RuntimeError("this package is a placeholder")

        name = "torch_neuronx.neuron_dynamo_backend.backend"
        monkeypatch.setitem(sys.modules, name, Placeholder(name))
        assert "this package is a placeholder" in self.refusal()

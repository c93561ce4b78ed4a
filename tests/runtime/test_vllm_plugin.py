"""vLLM's load format, over a stand-in for the part of vLLM that plugins see, and over vLLM where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepinfer_prep import convert_checkpoint
from deepinfer_prep.errors import ManifestError
from deepinfer_prep.runtime import vllm_plugin
from deepinfer_prep.runtime.attributes import KERNEL_SCALE, SCALE
from tests.small_files import write_file

LOADERS: dict[str, type] = {}


class BaseModelLoader:
    """Builds a model and lets the subclass fill it, in the order of vLLM's own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        self.load_weights(self.model, model_config)  # type: ignore[attr-defined]
        return self.model.eval()


def register_model_loader(name: str) -> Callable[[type], type]:
    def decorate(loader: type) -> type:
        LOADERS[name] = loader
        return loader

    return decorate


class Model(nn.Module):
    """A layer that loads by name, as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 128, dtype=torch.float8_e4m3fn), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = dict(weights)
        assert sorted(found) == ["layer.scale", "layer.weight"]
        self.weight.data.copy_(found["layer.weight"])
        setattr(self.weight, SCALE, found["layer.scale"].clone())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.model_executor.model_loader")
    module.BaseModelLoader = BaseModelLoader  # type: ignore[attr-defined]
    module.register_model_loader = register_model_loader  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    LOADERS.clear()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    tensors = {"layer.weight": ("F8_E4M3", (64, 128), 0x7E), "layer.scale": ("F8_E8M0", (2, 4), 127)}
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source" / "model.safetensors", tensors)
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    return tmp_path / "out"


def test_the_entry_point_leads_to_the_plugin() -> None:
    found = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "deepinfer_prep"]
    assert found[0].load() is vllm_plugin.register


def test_a_model_is_fed_and_prepared(stand_in: None, output: Path) -> None:
    vllm_plugin.register()
    loader = LOADERS[vllm_plugin.LOAD_FORMAT](Model())
    config = SimpleNamespace(model=str(output))
    loader.download_model(config)
    model = loader.load_model(vllm_config=None, model_config=config)
    assert (model.weight.view(torch.uint8) == 0x76).all()
    assert (getattr(model.weight, KERNEL_SCALE) == 128).all()


def test_what_is_no_output_is_refused(stand_in: None, tmp_path: Path) -> None:
    vllm_plugin.register()
    loader = LOADERS[vllm_plugin.LOAD_FORMAT](Model())
    with pytest.raises(ManifestError, match="is no folder"):
        loader.download_model(SimpleNamespace(model="org/model"))
    with pytest.raises(ManifestError):
        loader.load_weights(Model(), SimpleNamespace(model=str(tmp_path)))


def test_vllm_itself_knows_the_format() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    loaders = pytest.importorskip("vllm.model_executor.model_loader")
    vllm_plugin.register()
    assert vllm_plugin.LOAD_FORMAT in loaders._LOAD_FORMAT_TO_MODEL_LOADER

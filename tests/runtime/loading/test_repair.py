"""Unprepared checkpoints loaded with repair=True: what converting first would give, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.errors import ManifestError, RefusedError
from deepinfer_prep.runtime.attributes import ATTACHED
from deepinfer_prep.runtime.load import load_weights, weights_iterator
from deepinfer_prep.runtime.loading.assembly import Target
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.slices import Slice
from tests.runtime import prepared
from tests.runtime.models import Holder
from tests.runtime.prepared import same_bytes
from tests.small_files import write_config, write_file

E4M3 = torch.float8_e4m3fn
TENSORS: dict[str, prepared.Tensor] = {
    "a.weight": prepared.fp8((128, 96), 1),
    "a.weight_scale_inv": ("F32", (4, 3), np.exp2(np.arange(12) - 20).astype(np.float32).tobytes()),
    "b.weight": prepared.fp8((96, 96), 2),
    "b.weight_scale_inv": ("F32", (3, 3), np.linspace(0.1, 1, 9, dtype=np.float32).tobytes()),
    "hc_attn_fn": prepared.f32((24, 256), 4),
    "norm": prepared.bf16((64,), 5),
}
"""With a derived kernel scale, one that is none, and a split matrix."""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared.prepare(tmp_path_factory.mktemp("repair"), TENSORS, shards=2)


@pytest.fixture
def source(output: Path) -> Path:
    return output.parent / "source"


def test_every_tensor_is_the_one_of_the_output(source: Path, output: Path) -> None:
    repaired, expected = PreparedCheckpoint(source, repair=True), PreparedCheckpoint(output)
    assert list(repaired.tensors) == list(expected.tensors)
    assert repaired.manifest.weights == expected.manifest.weights
    assert all(same_bytes(repaired.read(name), expected.read(name)) for name in expected.tensors)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_the_one_that_the_output_gives(source: Path, output: Path, device: str) -> None:
    models = []
    for folder, repair in ((source, True), (output, False), (output, True)):
        with torch.device(device):
            model = nn.Module()
            model.ab = nn.Parameter(torch.zeros(224, 96, dtype=E4M3), requires_grad=False)
            model.hc_attn_fn = nn.Parameter(torch.zeros(24, 256), requires_grad=False)
            model.norm = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), requires_grad=False)

        def rename(name: str) -> str | Target | None:
            if name.endswith("scale_inv"):
                return None
            return Target("ab", part=int(name[0] == "b")) if name.endswith("weight") else name

        load_weights(model, folder, rename=rename, repair=repair)
        models.append(model)
    repaired, *others = (dict(everything(model)) for model in models)
    assert {"ab", "ab.sf", "hc_attn_fn._nki_fn_hi", "norm"} <= repaired.keys()
    for other in others:
        assert repaired.keys() == other.keys()
        assert all(same_bytes(repaired[name], other[name]) for name in other)


def everything(model: nn.Module) -> Any:
    """Parameters and all that is attached to them."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for attribute in ATTACHED:
            if isinstance(found := getattr(parameter, attribute, None), torch.Tensor):
                yield f"{name}.{attribute}", found


def test_the_iterator_repairs_as_well(source: Path, output: Path) -> None:
    expected = dict(weights_iterator(output))
    found = dict(weights_iterator(PreparedCheckpoint(source, repair=True)))
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], expected[name]) for name in expected)


def test_parts_are_those_of_the_output(source: Path, output: Path) -> None:
    part = Slice(rows=(32, 96), columns=(32, 64))
    repaired, expected = (
        opened.read_weight("a.weight", part)
        for opened in (PreparedCheckpoint(source, repair=True), PreparedCheckpoint(output))
    )
    for name in ("weight", "scale", "kernel_scale"):
        assert same_bytes(getattr(repaired, name), getattr(expected, name))


def test_a_sample_of_the_release_is_what_its_output_is(sample: Path, tmp_path: Path) -> None:
    convert_checkpoint(sample, tmp_path / "out")
    repaired, expected = PreparedCheckpoint(sample, repair=True), PreparedCheckpoint(tmp_path / "out")
    assert list(repaired.tensors) == list(expected.tensors)
    assert all(same_bytes(repaired.read(name), expected.read(name)) for name in expected.tensors)


def test_without_it_an_unprepared_folder_is_refused_with_both_remedies(source: Path) -> None:
    with pytest.raises(
        ManifestError, match=r"Convert the checkpoint with `deepinfer-prep convert`, or give repair=True"
    ):
        load_weights(Holder(norm=torch.zeros(64)), source)


def test_what_a_conversion_refuses_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w.weight": prepared.fp8((32, 32)), "n": prepared.f32((4,))})
    write_config(tmp_path, quant_method="fp8", weight_block_size=[32, 32])
    model = Holder(n=torch.full((4,), 7.0))
    with pytest.raises(RefusedError, match="no scale"):
        load_weights(model, tmp_path, repair=True)
    infinite = ("F32", (1, 1), np.float32(np.inf).tobytes())
    write_file(tmp_path / "model.safetensors", {"w.weight": prepared.fp8((32, 32)), "w.weight_scale_inv": infinite})
    with pytest.raises(RefusedError, match="the scale cannot be doubled exactly"):
        load_weights(model, tmp_path, repair=True)
    assert model.n.tolist() == [7.0] * 4


def test_digests_are_for_outputs(source: Path, output: Path) -> None:
    with pytest.raises(ValueError, match="a folder to repair does not have"):
        PreparedCheckpoint(source, repair=True, verify="digests")
    PreparedCheckpoint(output, repair=True, verify="digests").read("norm")

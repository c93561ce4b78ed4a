"""Tensors of a checkpoint that make up one tensor of a model: every axis, every form of scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.runtime.load import load_weights
from deepinfer_prep.runtime.loading.assembly import Target
from tests.runtime import prepared
from tests.runtime.models import Holder, attribute
from tests.runtime.prepared import same_bytes

E4M3 = torch.float8_e4m3fn
QKV_ROWS = {"q": 256, "k": 64, "v": 64}


def one_f32(value: float) -> prepared.Tensor:
    return "F32", (), np.float32(value).tobytes()


def weight_only(parameter: str, parts: str):
    """A rename that stacks the weights named by one letter of `parts` each and leaves scales to them."""

    def rename(name: str) -> Target | None:
        return Target(parameter, part=parts.index(name[0])) if name.endswith(".weight") else None

    return rename


def test_vectors_of_different_lengths_are_stacked(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, {"a.bias": prepared.f32((4,), 1), "b.bias": prepared.f32((6,), 2)})
    model = Holder(bias=torch.zeros(10))
    load_weights(model, output, rename=lambda name: Target("bias", part="ab".index(name[0])))
    found = prepared.stored(output)
    assert same_bytes(model.bias, torch.cat([found["a.bias"], found["b.bias"]]))


def test_stacks_of_matrices_are_stacked_along_their_rows(tmp_path: Path) -> None:
    shapes = {"a": (3, 4, 8), "b": (3, 2, 8)}
    output = prepared.prepare(tmp_path, {f"{name}.w": prepared.f32(shape) for name, shape in shapes.items()})
    model = Holder(w=torch.zeros(3, 6, 8))
    load_weights(model, output, rename=lambda name: Target("w", part="ab".index(name[0])))
    found = prepared.stored(output)
    assert same_bytes(model.w, torch.cat([found["a.w"], found["b.w"]], dim=1))


@pytest.mark.parametrize(
    ("scale_shape", "expected"), [((), (2, 1)), ((1,), (2, 1)), ((32,), (64, 1)), ((32, 1), (64, 1))]
)
def test_scales_of_merged_weights_are_stacked_as_their_weights_are(
    tmp_path: Path, scale_shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    tensors = {}
    for number, name in enumerate("ab"):
        values = np.arange(1, 1 + int(np.prod(scale_shape)), dtype=np.float32) * (number + 1) / 64
        tensors[f"{name}.weight"] = prepared.fp8((32, 64), number)
        tensors[f"{name}.weight_scale"] = ("F32", scale_shape, values.tobytes())
    output = prepared.prepare(tmp_path, tensors)
    model = Holder(w=torch.zeros(64, 64, dtype=E4M3))
    load_weights(model, output, rename=weight_only("w", "ab"))
    found = prepared.stored(output)
    scales = torch.cat([found[f"{name}.weight_scale"].reshape(-1, 1) for name in "ab"])
    assert attribute(model.w, "sf").shape == expected
    assert torch.equal(attribute(model.w, "sf"), scales)


def test_experts_of_different_shapes_are_refused(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, {"e.0.w": prepared.f32((4, 8)), "e.1.w": prepared.f32((6, 8))})
    with pytest.raises(RefusedError, match=r"the experts of 'e\.0\.w' to 'e\.1\.w' have different shapes"):
        load_weights(Holder(w=torch.zeros(2, 4, 8)), output, rename=lambda name: Target("w", int(name[2])))

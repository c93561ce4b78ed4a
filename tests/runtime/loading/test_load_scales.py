"""Loading models: scales in other forms than the kernels', shared ones, and lone ones of experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from deepinfer_prep.runtime.load import load_weights
from deepinfer_prep.runtime.loading.assembly import Target
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from tests.runtime import prepared
from tests.runtime.models import Holder, attribute
from tests.runtime.prepared import same_bytes

E4M3 = torch.float8_e4m3fn


def float_scales(values: list[float]) -> prepared.Tensor:
    return "F32", (2, 2), torch.tensor(values).numpy().tobytes()


def test_float_scales_become_kernel_scales_where_they_are_powers_of_two(tmp_path: Path) -> None:
    tensors = {
        "a.weight": prepared.fp8((256, 160), 1),
        "a.weight_scale_inv": float_scales([0.5, 1, 2, 4]),
        "b.weight": prepared.fp8((256, 160), 2),
        "b.weight_scale_inv": float_scales([0.3, 1, 2, 4]),
    }
    output = prepared.prepare(tmp_path, tensors, block=(128, 128))
    with torch.device("meta"):
        model = nn.Module()
        model.a = Holder(weight=torch.zeros(256, 160, dtype=E4M3))
        model.b = Holder(weight=torch.zeros(256, 160, dtype=E4M3))
    load_weights(model, output)
    exact, other = model.a.weight, model.b.weight
    assert torch.equal(attribute(exact, "sf"), torch.tensor([[1.0, 2], [4, 8]]))
    assert attribute(exact, "_nki_scale").shape == (8, 5)
    assert attribute(exact, "_nki_scale")[::4, ::4].tolist() == [[127, 128], [129, 130]]
    assert attribute(exact, "_nki_scale")[3, 3].item() == 127
    assert not hasattr(other, "_nki_scale")
    assert torch.equal(attribute(other, "_nki_block_scale"), torch.tensor([[0.6, 2], [4, 8]]))
    assert attribute(other, "_nki_weight").data_ptr() == other.data_ptr()


def test_one_scale_for_many_weights_is_read_once(tmp_path: Path) -> None:
    tensors = {f"shards.{n}.weight": prepared.fp8((32, 64), n) for n in range(4)}
    tensors["shards.0.scale"] = prepared.e8m0((1, 2))
    tensors |= {f"shards.{n}.scale": prepared.e8m0((1, 2), n) for n in range(1, 4)}
    output = prepared.prepare(tmp_path, tensors)
    manifest = json.loads((output / "neuron_manifest.json").read_text())
    for record in manifest["weights"].values():
        record["scale"] = record["kernel_scale"] = "shards.0.scale"
    (output / "neuron_manifest.json").write_text(json.dumps(manifest))
    with torch.device("meta"):
        model = nn.Module()
        model.shards = nn.ModuleList(Holder(weight=torch.zeros(32, 64, dtype=E4M3)) for _ in range(4))
    report = load_weights(
        model,
        PreparedCheckpoint(output, access="pread"),
        rename=lambda name: name if name.endswith("weight") else None,
    )
    scales = [attribute(shard.weight, "sf") for shard in model.shards]
    assert same_bytes(scales[0], prepared.stored(output)["shards.0.scale"])
    assert all(scale is scales[0] for scale in scales)
    assert report.bytes_read == 4 * 32 * 64 + 2


def test_lone_scales_of_experts_are_stacked(tmp_path: Path) -> None:
    tensors: dict[str, prepared.Tensor] = {}
    for expert in range(3):
        tensors[f"e.{expert}.weight"] = prepared.fp8((32, 64), expert)
        tensors[f"e.{expert}.weight_scale"] = ("F32", (), torch.tensor(2.0**-expert).numpy().tobytes())
    output = prepared.prepare(tmp_path, tensors)
    model = Holder(w=torch.zeros(3, 32, 64, dtype=E4M3))
    load_weights(model, output, rename=lambda name: Target("w", int(name[2])) if name.endswith("weight") else None)
    assert torch.equal(attribute(model.w, "sf"), torch.tensor([2.0, 1, 0.5]).reshape(3, 1, 1))

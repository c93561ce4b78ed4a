"""What hosts do beside filling parameters of the checkpoint's own names, shapes and dtypes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.errors import RefusedError
from deepinfer_prep.runtime import gemm, mhc
from deepinfer_prep.runtime.load import LoadReport, load_weights
from deepinfer_prep.runtime.loading.assembly import Target
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.scale_form import ScaleForm
from deepinfer_prep.runtime.loading.slices import Slice
from tests.runtime import prepared
from tests.runtime.models import Holder, attribute, frozen
from tests.runtime.prepared import same_bytes
from tests.small_files import write_config, write_file

E4M3, E8M0, BF16 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16
FP8_WEIGHT = {"w.weight": prepared.fp8((64, 64)), "w.scale": prepared.e8m0((2, 2))}
"""A weight that every source here holds, as a checkpoint without one is no checkpoint to convert."""


def no_scales(name: str) -> str | None:
    return None if name.endswith("scale") else name


def refused(model: nn.Module, output: Path, **rules: object) -> str:
    with pytest.raises(RefusedError) as caught:
        load_weights(model, output, **rules)  # type: ignore[arg-type]
    assert caught.value.reasons[-1] == "Nothing was loaded."
    return str(caught.value)


def weights(device: str = "cpu", **others: torch.Tensor) -> nn.Module:
    """A model with the weight of `FP8_WEIGHT` and other parameters."""
    with torch.device(device):
        model = nn.Module()
        model.w = Holder(weight=torch.zeros(64, 64, dtype=E4M3))
    for name, tensor in others.items():
        setattr(model, name, frozen(tensor.to(device)))
    return model


# One tensor in several places


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_goes_to_every_place_that_is_named(tmp_path: Path, device: str) -> None:
    tensors = {f"e.{n}.weight": prepared.fp4((64, 32), n) for n in range(2)}
    tensors |= {f"e.{n}.scale": prepared.e8m0((64, 2), n) for n in range(2)}
    output = prepared.prepare(tmp_path, tensors)
    slots = [0, 1, 0]
    with torch.device(device):
        model = Holder(w=torch.zeros(3, 64, 32, dtype=torch.int8))

    def rename(name: str) -> list[str | Target] | None:
        expert = int(name.split(".")[1])
        return [Target("w", slot) for slot, held in enumerate(slots) if held == expert] if "weight" in name else None

    load_weights(model, output, rename=rename)
    found = prepared.stored(output)
    assert same_bytes(model.w, torch.stack([found[f"e.{n}.weight"] for n in slots]))
    scales = torch.stack([found[f"e.{n}.scale"].view(torch.uint8) for n in slots])
    assert torch.equal(attribute(model.w, "_nki_scale"), scales)


def test_a_tensor_in_two_parameters_has_memory_in_each(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT | {"n": prepared.bf16((64,))})
    model = weights("meta", a=torch.zeros(64, dtype=BF16), b=torch.zeros(64, dtype=BF16))
    load_weights(model, output, rename=lambda name: ("a", "b") if name == "n" else no_scales(name))
    assert same_bytes(model.a, model.b)
    assert model.a.data_ptr() != model.b.data_ptr()


def test_a_scale_in_two_modules_is_attached_from_the_module_of_each_weight(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT)
    model = nn.Module()
    for name in ("a", "b"):
        setattr(model, name, Holder(weight=torch.zeros(64, 64, dtype=E4M3), scale=torch.zeros(2, 2, dtype=E8M0)))
    load_weights(model, output, rename=lambda name: [f"{module}.{name.split('.')[1]}" for module in "ab"])
    assert attribute(model.a.weight, "sf") is model.a.scale
    assert attribute(model.b.weight, "sf") is model.b.scale


@pytest.mark.parametrize("wanted", [3, (None,), [b"w"], ["w", 1], {"w"}])
def test_a_wrong_return_value_of_rename_is_said(tmp_path: Path, wanted: object) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT)
    with pytest.raises(TypeError, match=r"rename\('w\.\w+'\) returned .*Expected the name of a parameter"):
        load_weights(weights(), output, rename=lambda name: wanted)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("wanted", [(0, 32), slice(0, 32), "rows"])
def test_a_wrong_return_value_of_slices_is_said(tmp_path: Path, wanted: object) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT)
    with pytest.raises(TypeError, match=r"slices\('w\.weight'\) returned .*Expected a Slice"):
        load_weights(weights(), output, rename=no_scales, slices=lambda name: wanted)  # type: ignore[arg-type,return-value]


# Ties


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_over_one_memory_are_one_place(tmp_path: Path, device: str) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT | {"embed": prepared.bf16((32, 64))})
    model = weights(device, embed=torch.zeros(32, 64, dtype=BF16))
    model.head = nn.Parameter(model.embed.data, requires_grad=False)
    report = load_weights(model, output, rename=no_scales)
    assert report.missing == ()
    assert model.head is not model.embed
    assert model.head.data_ptr() == model.embed.data_ptr()
    assert same_bytes(model.head, prepared.stored(output)["embed"])


def test_attributes_go_to_every_object_over_one_memory(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT)
    model = weights()
    model.again = nn.Parameter(model.w.weight.data, requires_grad=False)
    load_weights(model, output, rename=no_scales)
    assert attribute(model.again, "_nki_weight").data_ptr() == model.w.weight.data_ptr()


def load_tied(folder: Path, caplog: pytest.LogCaptureFixture, head: prepared.Tensor) -> tuple[LoadReport, list[str]]:
    output = prepared.prepare(folder, FP8_WEIGHT | {"embed": prepared.bf16((32, 64), 1), "head": head})
    model = weights(embed=torch.zeros(32, 64, dtype=BF16))
    model.head = model.embed
    report = load_weights(model, output, rename=no_scales)
    assert same_bytes(model.head, prepared.stored(output)["embed"])
    return report, [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("rows_at_once", [7, 1000])
def test_a_stored_tensor_that_a_tie_drops_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr("deepinfer_prep.runtime.loading.tied._BYTES_AT_ONCE", rows_at_once * 128)
    report, warnings = load_tied(tmp_path / "equal", caplog, prepared.bf16((32, 64), 1))
    assert (report.tied, warnings) == ({"head": "embed"}, [])
    dtype, shape, content = prepared.bf16((32, 64), 1)
    last_byte_differs = content[:-1] + bytes([content[-1] ^ 1])
    _, warnings = load_tied(tmp_path / "differs", caplog, (dtype, shape, last_byte_differs))
    assert len(warnings) == 1
    assert "'head' is stored and differs from 'embed', but the model ties their parameters" in warnings[0]
    assert "tie_word_embeddings=False" in warnings[0]


# Padding


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", ["F32", "F8_E8M0"])
def test_rows_of_padding_are_zeros_and_their_scales_one(tmp_path: Path, device: str, dtype: str) -> None:
    scale = prepared.e8m0((3, 2)) if dtype == "F8_E8M0" else ("F32", (3, 2), np.full(6, 0.25, np.float32).tobytes())
    output = prepared.prepare(tmp_path, {"t.weight": prepared.fp8((96, 64)), "t.weight_scale_inv": scale})
    with torch.device(device):
        model = Holder(t=torch.full((128, 64), 7, dtype=torch.uint8))
    load_weights(
        model,
        output,
        rename=lambda name: "t" if name == "t.weight" else None,
        slices=lambda name: Slice(rows=(32, 96)),
        pad_rows="t",
        scales=ScaleForm(torch.float32),
    )
    found = prepared.stored(output)
    assert torch.equal(model.t[:64], found["t.weight"].view(torch.uint8)[32:])
    assert not model.t[64:].any()
    assert torch.equal(attribute(model.t, "sf")[:2], found["t.weight_scale_inv"].float()[1:])
    assert torch.equal(attribute(model.t, "sf")[2:], torch.ones(2, 2))
    assert attribute(model.t, "_nki_scale")[2:].unique().tolist() == [127]


def test_padding_is_for_named_parameters_and_their_rows_alone(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT | {"n": prepared.bf16((4, 8)), "m": prepared.bf16((4, 8))})
    model = weights(n=torch.zeros(6, 8, dtype=BF16), m=torch.zeros(4, 9, dtype=BF16))
    message = refused(model, output, rename=no_scales, pad_rows=["m"])
    assert "n: wrong shape: the model has [6, 8], the checkpoint gives [4, 8]" in message
    assert "name the parameter in `pad_rows`" in message
    assert "m: wrong shape: the model has [4, 9]" in message


# The form of scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scales_are_delivered_as_values(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = np.arange(132, dtype=np.uint8)
    output = prepared.prepare(
        tmp_path, {"w.weight": prepared.fp8((132 * 32, 32)), "w.scale": ("F8_E8M0", (132, 1), codes.tobytes())}
    )
    model = nn.Module()
    model.w = Holder(weight=torch.zeros(132 * 32, 32, dtype=E4M3))
    load_weights(model, output, rename=no_scales, scales=ScaleForm(dtype))
    sf = attribute(model.w.weight, "sf")
    assert sf.dtype == dtype
    expected = torch.exp2(torch.arange(132, dtype=torch.float64) + 1 - 127).reshape(132, 1)
    assert torch.equal(sf.double(), expected)
    assert torch.equal(attribute(model.w.weight, "_nki_scale").reshape(-1), torch.arange(1, 133, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, E8M0])
@pytest.mark.parametrize("column_major", [False, True])
def test_scales_are_delivered_as_bytes_or_words_of_either_order(
    tmp_path: Path, dtype: torch.dtype, column_major: bool
) -> None:
    tensors = {f"e.{n}.weight": prepared.fp4((64, 64), n) for n in range(2)}
    tensors |= {f"e.{n}.scale": prepared.e8m0((64, 4), n) for n in range(2)}
    output = prepared.prepare(tmp_path, tensors)
    model = Holder(w=torch.zeros(2, 64, 64, dtype=torch.int8))
    load_weights(
        model,
        output,
        rename=lambda name: Target("w", int(name[2])) if "weight" in name else None,
        scales=lambda parameter: ScaleForm(dtype, column_major),
    )
    sf, found = attribute(model.w, "sf"), prepared.stored(output)
    expected = torch.stack([found[f"e.{n}.scale"] for n in range(2)]).view(dtype)
    assert sf.dtype == dtype
    assert sf.stride() == ((expected.shape[1] * expected.shape[2], 1, 64) if column_major else expected.stride())
    rows = sf.clone(memory_format=torch.contiguous_format)
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
    assert gemm.prepare_model(model) == 1, "a model in this form can be prepared again"


ONES: prepared.Tensor = ("F32", (2, 2), np.ones(4, np.float32).tobytes())


@pytest.mark.parametrize(
    ("scale", "form", "problem"),
    [
        (
            ("F32", (2, 2), np.ones(4, np.float32).tobytes()),
            ScaleForm(torch.int16),
            "cannot be delivered as torch.int16",
        ),
        (("F32", (2, 2), np.ones(4, np.float32).tobytes()), ScaleForm(BF16), "cannot be delivered as torch.bfloat16"),
        (prepared.e8m0((2, 2)), ScaleForm(torch.float16), "cannot be delivered as torch.float16"),
        (prepared.e8m0((2, 2)), ScaleForm(torch.int32), "do not fill words of torch.int32"),
        (prepared.e8m0((2, 2)), ScaleForm(torch.int64), "is no form of a scale"),
        (("F32", (), np.ones(1, np.float32).tobytes()), ScaleForm(column_major=True), "has no columns"),
    ],
)
def test_a_form_that_would_change_values_is_refused(
    tmp_path: Path, scale: prepared.Tensor, form: ScaleForm, problem: str
) -> None:
    output = prepared.prepare(tmp_path, {"w.weight": prepared.fp8((64, 64)), "w.weight_scale_inv": scale})
    model = weights()
    assert problem in refused(model, output, rename=lambda name: name if name == "w.weight" else None, scales=form)
    assert not model.w.weight.view(torch.uint8).any()


def test_a_wrong_return_value_of_scales_is_said(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT)
    with pytest.raises(TypeError, match=r"scales\('w\.weight'\) returned torch\.float32\. Expected a ScaleForm"):
        load_weights(weights(), output, rename=no_scales, scales=lambda name: torch.float32)  # type: ignore[arg-type,return-value]


# Other dtypes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_values_are_converted_where_that_is_asked_for_by_name(tmp_path: Path, device: str) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT | {"norm": prepared.bf16((64,)), "bias": prepared.f32((64,))})
    model = weights(device, norm=torch.zeros(64), bias=torch.zeros(64, dtype=BF16))
    model.w.scale = frozen(torch.zeros(2, 2, device=device))
    load_weights(model, output, cast=["norm", "bi*", "w.scale"])
    found = prepared.stored(output)
    assert torch.equal(model.norm, found["norm"].float())
    assert torch.equal(model.bias, found["bias"].to(BF16))
    assert torch.equal(model.w.scale, found["w.scale"].float())
    assert attribute(model.w.weight, "sf") is model.w.scale
    assert torch.equal(attribute(model.w.weight, "_nki_scale"), found["w.scale"].view(torch.uint8))


def test_a_dtype_that_does_not_fit_names_what_to_do(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT | {"norm": prepared.bf16((64,))})
    model = weights(norm=torch.zeros(64))
    model.w = Holder(weight=torch.zeros(64, 64, dtype=BF16), scale=torch.zeros(2, 2))
    message = refused(model, output, cast=["w.weight"])
    assert message.count("wrong dtype") == 3
    assert "Either create the parameter as torch.bfloat16, or have the values converted with cast=['norm']." in message
    assert "Either let `rename` return None for the scale, and its weight gets it as `.sf`, or create" in message
    assert "A quantized weight means nothing without its scale: create the parameter as torch.float8_e4m3fn" in message


# Exceptions to strict


def test_named_parameters_may_be_missing_and_named_tensors_left_over(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT | {"extra.a": prepared.bf16((4,)), "extra.b": prepared.bf16((4,))})
    model = weights(own=torch.full((4,), 3.0), other=torch.zeros(4))
    message = refused(model, output, allow_missing=["own"], allow_unexpected="extra.a")
    assert "1 missing: no tensor of the checkpoint goes to other." in message
    assert "1 unexpected: the model has no place for extra.b." in message
    report = load_weights(model, output, allow_missing=["own", "oth*"], allow_unexpected="extra.*")
    assert report.missing == ("own", "other")
    assert report.unexpected == ("extra.a", "extra.b")
    assert model.own.tolist() == [3] * 4


# Merged weights with one scale each


@pytest.mark.parametrize("rows", [{"q": 256, "k": 128, "v": 64}, {"q": 256, "k": 64, "v": 64}])
@pytest.mark.parametrize("values", [(0.25, 0.5, 2.0), (0.3, 0.5, 0.7)])
def test_weights_of_different_rows_with_a_scale_each_are_merged(
    tmp_path: Path, rows: Mapping[str, int], values: tuple[float, ...]
) -> None:
    tensors: dict[str, prepared.Tensor] = {}
    for (name, count), value in zip(rows.items(), values, strict=True):
        tensors[f"{name}.weight"] = prepared.fp8((count, 128), count)
        tensors[f"{name}.weight_scale"] = ("F32", (), np.float32(value).tobytes())
    output = prepared.prepare(tmp_path, tensors)
    model = Holder(qkv=torch.zeros(sum(rows.values()), 128, dtype=E4M3))
    load_weights(
        model, output, rename=lambda name: Target("qkv", part="qkv".index(name[0])) if name[2:] == "weight" else None
    )
    doubled = 2 * torch.tensor(values)
    assert torch.equal(attribute(model.qkv, "sf"), doubled.reshape(3, 1))
    by_row = doubled.repeat_interleave(torch.tensor(list(rows.values())))
    x = torch.randn(4, 128).to(BF16)
    expected = x.float() @ (model.qkv.float() * by_row[:, None]).T
    if rows["k"] == 64 and values[0] == 0.3:
        assert not gemm.has_kernel(model.qkv), "no kernel takes blocks that begin at row 320"
        return
    result = gemm.linear_qdq(x, model.qkv)
    assert float((result.float() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_lone_scale_of_a_matrix_of_one_block_reaches_its_kernel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {"w.weight": prepared.fp8((128, 128)), "w.weight_scale": ("F32", shape, np.float32(0.3).tobytes())}
    output = prepared.prepare(tmp_path, tensors, block=(128, 128))
    model = nn.Module()
    model.w = Holder(weight=torch.zeros(128, 128, dtype=E4M3))
    load_weights(model, output, rename=lambda name: name if name == "w.weight" else None)
    weight, x = model.w.weight, torch.randn(4, 128).to(BF16)
    expected = x.float() @ (weight.float() * 0.6).T
    assert attribute(weight, "_nki_block_scale").shape == (1, 1)
    assert float((gemm.linear_qdq(x, weight).float() - expected).norm() / expected.norm()) < 0.05


def test_a_grid_stored_with_axes_of_one_is_a_matrix_everywhere(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(0.01, 0.1, (4, 1, 2, 1)).astype(np.float32)
    tensors = {"w.weight": prepared.fp8((512, 256)), "w.weight_scale": ("F32", (4, 1, 2, 1), values.tobytes())}
    write_file(tmp_path / "source" / "model.safetensors", tensors)
    write_config(tmp_path / "source", quant_method="modelopt", quant_algo="FP8_PB_WO")
    output = tmp_path / "output"
    convert_checkpoint(tmp_path / "source", output)
    model = nn.Module()
    model.w = Holder(weight=torch.zeros(512, 256, dtype=E4M3))
    load_weights(model, output, rename=lambda name: name if name == "w.weight" else None)
    doubled = 2 * torch.from_numpy(values).reshape(4, 2)
    assert torch.equal(attribute(model.w.weight, "sf"), doubled)
    assert torch.equal(attribute(model.w.weight, "_nki_block_scale"), doubled)
    with PreparedCheckpoint(output) as opened:
        assert opened.read("w.weight_scale").shape == (4, 1, 2, 1)
        assert torch.equal(opened.read_weight("w.weight").scale, doubled)
        for axis, rank in (("rows", 0), ("rows", 1), ("columns", 1)):
            part = opened.share("w.weight", axis, rank, 2)  # type: ignore[arg-type]
            expected = doubled.chunk(2, dim=int(axis == "columns"))[rank]
            assert torch.equal(opened.read_weight("w.weight", part).scale, expected)


# After copying and wrapping


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("change", ["deepcopy", "wrap"])
def test_preparing_restores_what_copies_and_wrappers_drop(tmp_path: Path, device: str, change: str) -> None:
    output = prepared.prepare(tmp_path, FP8_WEIGHT | {"hc_attn_fn": prepared.f32((24, 256))})
    model = weights(device, hc_attn_fn=torch.zeros(24, 256))
    load_weights(model, output, rename=no_scales)
    names = ("sf", "_nki_scale", "_nki_weight")
    before = {name: attribute(model.w.weight, name).clone() for name in names}
    split = [attribute(model.hc_attn_fn, name).clone() for name in ("_nki_fn_hi", "_nki_fn_lo")]
    if change == "deepcopy":
        model = copy.deepcopy(model)
    else:
        model.w.weight = nn.Parameter(model.w.weight.data, requires_grad=False)
        model.hc_attn_fn = nn.Parameter(model.hc_attn_fn.data, requires_grad=False)
    assert not hasattr(model.w.weight, "sf")
    assert (gemm.prepare_model(model), mhc.prepare_model(model)) == (1, 1)
    for name, expected in before.items():
        assert same_bytes(attribute(model.w.weight, name), expected)
    for name, expected in zip(("_nki_fn_hi", "_nki_fn_lo"), split, strict=True):
        assert same_bytes(attribute(model.hc_attn_fn, name), expected)
    assert "sf" not in str(list(model.state_dict()))

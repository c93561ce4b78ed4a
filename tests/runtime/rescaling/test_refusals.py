"""Halving in memory: everything that is wrong is named at once, and then nothing was changed."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.runtime.fp8 import rescale_fp8_weights
from deepinfer_prep.runtime.rescaling import address_space, byte_access
from tests.runtime.models import Layer, assert_halved_once, codes_of, e8m0, every_code, fp8, frozen, layer, random_codes


def refusal(model: nn.Module) -> str:
    """The message of a refusal, after which every tensor of the model is as it was."""
    held = [*model.parameters(), *model.buffers()]
    held += [tensor.sf for tensor in held if hasattr(tensor, "sf")]
    before = [codes_of(tensor.contiguous()) for tensor in held]
    with pytest.raises(RefusedError) as caught:
        rescale_fp8_weights(model)
    assert all(torch.equal(codes, codes_of(tensor.contiguous())) for codes, tensor in zip(before, held, strict=True))
    assert caught.value.reasons[-1] == "Nothing was changed."
    return str(caught.value)


def test_weights_without_scale_are_all_named():
    model = nn.ModuleDict({"a": Layer(every_code()), "b": layer(), "c": Layer(every_code().t())})
    message = refusal(model)
    assert "a.weight: float8_e4m3fn without a scale" in message
    assert "c.weight: float8_e4m3fn without a scale" in message
    assert "b.weight" not in message


def test_copy_that_lost_its_scales_is_named():
    assert "weight: float8_e4m3fn without a scale" in refusal(copy.deepcopy(layer()))


def test_persistent_buffer_without_scale_is_named():
    model = nn.Module()
    model.register_buffer("table", every_code())
    assert "table: float8_e4m3fn without a scale" in refusal(model)


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (
            torch.tensor([127, 254], dtype=torch.uint8),
            r"an element is the e8m0 byte 254 \(2\^127\), which has no double",
        ),
        (torch.tensor([127, 255], dtype=torch.uint8), r"an element is the e8m0 byte 255 \(NaN\)"),
        (torch.tensor([0x7FFE7F7F], dtype=torch.int32), "e8m0 byte 254"),
        (torch.tensor([1.0, 40000.0]).half(), "an element is 40000.*no finite F16 double"),
        (torch.tensor([1.0, 2e38]), r"an element is .*e\+38.*no finite F32 double"),
        (torch.tensor([1.0, 3e38]).bfloat16(), "no finite BF16 double"),
        (torch.tensor([1.0, torch.finfo(torch.float32).min]), "no finite F32 double"),
        (torch.tensor([1.0, torch.nan]), "an element is nan"),
        (torch.zeros(2, 2), "holds only zeros, but broken.weight does not: the scale was never loaded"),
        (every_code(2, 2), r"a scale of dtype torch\.float8_e4m3fn, which is no known form"),
        (torch.ones(2, 2, dtype=torch.int64), r"a scale of dtype torch\.int64"),
        (torch.ones(2, 2, device="meta"), "is on the meta device"),
    ],
)
def test_unusable_scales_are_refused_before_any_change(scale, reason):
    intact, broken = layer(), layer(scale=scale)
    model = nn.ModuleDict({"intact": intact, "broken": broken})
    before = codes_of(intact.weight), codes_of(broken.weight)
    with pytest.raises(RefusedError, match=reason) as caught:
        rescale_fp8_weights(model)
    assert "broken.weight.sf" in str(caught.value)
    assert "intact" not in str(caught.value)
    assert torch.equal(codes_of(intact.weight), before[0])
    assert torch.equal(codes_of(broken.weight), before[1])
    assert (codes_of(intact.weight.sf) == 127).all()


@pytest.mark.parametrize("scale", [torch.tensor([torch.nan]), torch.tensor([255], dtype=torch.uint8)])
def test_nan_scale_of_a_weight_that_would_stay_is_refused(scale):
    model = layer(fp8(torch.full((64, 64), 0x38, dtype=torch.uint8)), scale)
    assert "NaN" in refusal(model)


@pytest.mark.parametrize("scale", [torch.tensor([40000.0]).half(), torch.tensor([254], dtype=torch.uint8)])
def test_large_scale_of_a_weight_that_stays_is_fine(scale):
    model = layer(fp8(torch.full((64, 64), 0x38, dtype=torch.uint8)), scale)
    assert rescale_fp8_weights(model) == 0


def test_zero_scale_of_zero_weights_is_fine():
    model = layer(fp8(torch.tensor([[0x00, 0x80]], dtype=torch.uint8)), torch.zeros(1))
    assert rescale_fp8_weights(model) == 0


def test_a_scale_of_which_only_the_first_pieces_are_zero_is_fine(monkeypatch):
    monkeypatch.setattr(byte_access, "PIECE_BYTES", 4096)
    scale = torch.zeros(2048)
    scale[1500:] = 2.0
    model = layer(fp8(random_codes(2048, 32)), scale.view(2048, 1))
    before = codes_of(model.weight)
    assert rescale_fp8_weights(model) == 1
    assert_halved_once(before, model.weight)
    assert scale.unique().tolist() == [0.0, 4.0]


def test_fp8_scales_are_not_halved_as_weights():
    model = nn.Module()
    model.register_parameter("weight", frozen(random_codes(64, 32)))
    model.register_parameter("weight_scale", frozen(every_code(64, 4)))
    assert "weight_scale: float8_e4m3fn is used as a scale here (NVFP4)" in refusal(model)


def test_scale_that_another_format_needs_unchanged():
    scale = e8m0(64, 2)
    model = nn.ModuleDict({"fp8": layer(scale=scale), "fp4": Layer(random_codes(64, 32).view(torch.int8))})
    model["fp4"].weight.sf = scale
    message = refusal(model)
    assert "a scale of E8M0 (fp8.weight.sf) and the scale of a weight that is not halved (fp4.weight.sf)" in message


def test_scale_inside_a_weight():
    storage = torch.full((68,), 0x7E, dtype=torch.uint8)
    model = layer(fp8(storage)[:64].view(8, 8), storage[60:64])
    assert "The same bytes are an fp8 weight (weight) and a scale of E8M0 (weight.sf)." in refusal(model)


def test_scales_of_two_kinds_over_the_same_bytes():
    scale = torch.full((2, 2), 0.5)
    model = nn.ModuleList([layer(scale=scale), layer(scale=scale.view(torch.int32))])
    assert "a scale of F32 (0.weight.sf) and a scale of E8M0 (1.weight.sf)" in refusal(model)


def test_weights_on_meta_are_named():
    model = layer()
    model.weight = frozen(torch.empty(64, 64, dtype=torch.float8_e4m3fn, device="meta"))
    model.weight.sf = e8m0(2, 2)
    with pytest.raises(RefusedError, match=r"weight: is on the meta device\. Load the weights"):
        rescale_fp8_weights(model)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("r", "lies in memory that is mapped read-only"), ("r+", "changing it would change that file")],
)
def test_mapped_files_are_not_written_to(tmp_path, mode, reason):
    path = tmp_path / "shard"
    path.write_bytes(bytes([0x7E]) * 8192)
    mapped = np.memmap(path, dtype=np.uint8, mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = fp8(torch.from_numpy(mapped[4096:])).view(64, 64)
    model = nn.ModuleDict({"copied": layer(), "mapped": layer(weight)})
    message = refusal(model)
    assert f"mapped.weight: {'is a shared mapping of' if mode == 'r+' else reason}" in message
    assert reason in message
    assert str(path) in message
    assert path.read_bytes() == bytes([0x7E]) * 8192


def test_memory_shared_between_processes_is_fine():
    model = layer()
    model.weight.data.share_memory_()
    before = codes_of(model.weight)
    assert rescale_fp8_weights(model) == 1
    assert_halved_once(before, model.weight)


def test_system_without_a_list_of_mappings(monkeypatch, tmp_path):
    monkeypatch.setattr(address_space, "_MAPS", tmp_path / "absent")
    assert rescale_fp8_weights(layer()) == 1

"""A host's own loading, done by hand over the iterator, and the same as rules of `load_weights`: equal in every bit.

The model has what a serving engine's has: packed experts with a redundant copy and word scales by column, a table of
which a rank holds some rows and padding, a head over the memory of the embedding, a norm in float32.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
from torch import nn

from deepinfer_prep.runtime import ScaleForm, Slice, Target, load_weights, weights_iterator
from tests.runtime import prepared
from tests.runtime.models import Holder

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
LOCAL_EXPERTS = (0, 1, 0)
"""The expert that each local slot holds: the first one twice."""
TABLE_START, TABLE_ROWS = 32, 128


def sources() -> dict[str, prepared.Tensor]:
    tensors = {
        "attn.wq.weight": prepared.fp8((64, 64), 1),
        "attn.wq.scale": prepared.e8m0((2, 2), 1),
        "table.weight": prepared.fp8((96, 64), 2),
        "table.scale": prepared.e8m0((3, 2), 2),
        "embed.weight": prepared.bf16((32, 64), 3),
        "norm.weight": prepared.bf16((64,), 4),
    }
    for expert in range(2):
        for number, name in enumerate(("w1", "w2", "w3")):
            tensors[f"experts.{expert}.{name}.weight"] = prepared.fp4((64, 64), 10 * expert + number)
            tensors[f"experts.{expert}.{name}.scale"] = prepared.e8m0((64, 4), 10 * expert + number)
    return tensors


def host_model() -> nn.Module:
    model = nn.Module()
    model.wq = Holder(weight=torch.zeros(64, 64, dtype=E4M3))
    model.linear1 = Holder(weight=torch.zeros(3, 128, 64, dtype=torch.int8))
    model.linear2 = Holder(weight=torch.zeros(3, 64, 64, dtype=torch.int8))
    model.table = Holder(weight=torch.full((TABLE_ROWS, 64), 9, dtype=torch.uint8).view(E4M3))
    model.embed = Holder(weight=torch.zeros(32, 64, dtype=BF16))
    model.head = nn.Module()
    model.head.weight = nn.Parameter(model.embed.weight.data, requires_grad=False)
    model.norm = Holder(weight=torch.zeros(64))
    return model


def load_by_hand(model: nn.Module, folder: Path) -> None:
    """What a host does itself where a loader gives it tensors and no more."""
    tensors = dict(weights_iterator(folder))
    model.wq.weight.data.copy_(tensors["attn.wq.weight"])
    model.wq.weight.sf = tensors["attn.wq.scale"].float()
    model.embed.weight.data.copy_(tensors["embed.weight"])
    model.norm.weight.data.copy_(tensors["norm.weight"].float())
    for parameter, names in ((model.linear1.weight, ("w1", "w3")), (model.linear2.weight, ("w2",))):
        experts, rows, width = parameter.shape
        parameter.sf = torch.empty(experts, width * 2 // 64, rows, dtype=torch.int16).mT
        for slot, expert in enumerate(LOCAL_EXPERTS):
            weight = torch.cat([tensors[f"experts.{expert}.{name}.weight"] for name in names])
            scale = torch.cat([tensors[f"experts.{expert}.{name}.scale"].view(torch.uint8) for name in names])
            parameter.data[slot].copy_(weight)
            parameter.sf[slot].copy_(scale.view(torch.int16))
    rows = tensors["table.weight"].shape[0] - TABLE_START
    table, bytes_of_table = model.table.weight, model.table.weight.data.view(torch.uint8)
    table.data[:rows].copy_(tensors["table.weight"][TABLE_START:])
    bytes_of_table[rows:].zero_()
    table.sf = torch.ones(TABLE_ROWS // 32, 2)
    table.sf[: rows // 32].copy_(tensors["table.scale"][TABLE_START // 32 :].float())


def load_by_rules(model: nn.Module, folder: Path) -> None:
    def rename(name: str) -> str | list[Target] | None:
        match = re.fullmatch(r"experts\.(\d+)\.(w[123])\.weight", name)
        if match is None:
            return None if name.endswith("scale") else name.removeprefix("attn.")
        parameter, part = ("linear2.weight", 0) if match[2] == "w2" else ("linear1.weight", int(match[2] == "w3"))
        return [Target(parameter, slot, part) for slot, held in enumerate(LOCAL_EXPERTS) if held == int(match[1])]

    words, numbers = ScaleForm(torch.int16, column_major=True), ScaleForm(torch.float32)
    rows = {"table.weight": Slice(rows=(TABLE_START, 96))}
    scales = lambda name: words if name.startswith("linear") else numbers  # noqa: E731
    load_weights(model, folder, rename=rename, slices=rows.get, scales=scales, pad_rows="table.weight", cast="norm.*")


def test_the_rules_give_every_bit_dtype_shape_and_stride(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, sources())
    by_hand, by_rules = host_model(), host_model()
    load_by_hand(by_hand, output)
    load_by_rules(by_rules, output)
    for (name, mine), (_, other) in zip(by_hand.named_parameters(), by_rules.named_parameters(), strict=True):
        pairs = [(mine.detach(), other.detach())]
        if hasattr(mine, "sf"):
            pairs.append((mine.sf, other.sf))
        for left, right in pairs:
            assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride()), name
            whole = (one.clone(memory_format=torch.contiguous_format).view(torch.uint8) for one in (left, right))
            assert torch.equal(*whole), name
    assert by_rules.head.weight.data_ptr() == by_rules.embed.weight.data_ptr()


def test_the_rules_take_at_most_twelve_lines() -> None:
    lines = [line for line in inspect.getsource(load_by_rules).splitlines()[1:] if line.strip()]
    assert len(lines) <= 12

"""torchao: a tensor subclass taken apart, `m._weight_qdata` with `m._weight_scale` for the parameter `m.weight`.

What a tensor is stands in the header's metadata as JSON under the parameter's name (`_type`, `_data`;
torchao/prototype/safetensors). A Float8Tensor's and an MXTensor's scale multiplies; the metadata stays in
the output, so that torchao puts the same objects together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_prep.families.block_size import Blocks, fits, grid_problem, per_row, per_tensor
from deepinfer_prep.families.pairing import scale_problem
from deepinfer_prep.families.protocol import Layout, Unpaired, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.families.schemes import as_block
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.files.untrusted import CONFIG, JsonError, parse_object
from deepinfer_prep.quantized import QuantizedWeight

_NAME = "torchao"
_DATA, _SCALE = "_qdata", "_scale"
_MULTIPLYING = ("Float8Tensor", "MXTensor")


def layout(checkpoint: Checkpoint, _: Quantization) -> Layout | None:
    """Recognise a checkpoint by the metadata of its headers, which describes every fp8 tensor."""
    described = _descriptions(checkpoint)
    if not described:
        return None
    weights: list[QuantizedWeight] = []
    unpaired: dict[str, Unpaired] = {}
    for name in fp8_names(checkpoint):
        description = described.get(_parameter(name))
        if description is None:
            continue
        found = _pair(checkpoint, name, description)
        if isinstance(found, Unpaired):
            unpaired[name] = found
        else:
            weights.append(found)
    return Layout(_NAME, tuple(weights), unpaired)


def _descriptions(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Parameter name -> its JSON, from the metadata of all shards that torchao wrote."""
    described: dict[str, Mapping[str, Any]] = {}
    for shard in checkpoint.shards:
        if "tensor_names" in shard.header.metadata:
            for name, text in shard.header.metadata.items():
                value = _parse(text)
                if isinstance(value, dict) and isinstance(value.get("_type"), str):
                    described[name] = value
    return described


def _parse(text: str) -> Any:
    try:
        return parse_object(text.encode(), CONFIG)
    except JsonError:
        return None


def _parameter(name: str) -> str:
    """`m._weight_qdata` and `m._weight_scale` -> `m.weight`; other names give one that no parameter has."""
    module, _, last = name.rpartition(".")
    parameter = last.removeprefix("_").rpartition("_")[0] if last.startswith("_") else ""
    return f"{module}.{parameter}" if module else parameter


def _pair(checkpoint: Checkpoint, name: str, description: Mapping[str, Any]) -> QuantizedWeight | Unpaired:
    kind = description["_type"]
    if not name.endswith(_DATA):
        return Unpaired(
            f"are parts of a torchao {kind} other than its values",
            "They are scales in fp8, which have no scale of their own, and Trainium2 has no kernel for this format. "
            "Use an fp8 or bf16 checkpoint of the model instead.",
        )
    scale = checkpoint.tensors.get(name.removesuffix(_DATA) + _SCALE)
    if kind not in _MULTIPLYING or scale is None:
        return Unpaired(
            f"belong to a torchao {kind}" + (" without a scale" if scale is None else ""),
            f"Only {' and '.join(_MULTIPLYING)} are known to be the values times the scale. Save the model in one of "
            "these, or in bf16.",
        )
    problem = scale_problem(scale, kind == "MXTensor")
    if problem is not None:
        return problem
    blocks = _blocks(checkpoint.tensors[name], scale, description.get("_data"))
    return QuantizedWeight(name, scale.name, "e4m3", blocks.size, blocks.problem)


def _blocks(weight: TensorInfo, scale: TensorInfo, data: Any) -> Blocks:
    plain = per_tensor(weight, scale) or per_row(weight, scale)
    stated = data.get("block_size") if isinstance(data, dict) else None
    block = (1, stated) if type(stated) is int and stated > 0 else as_block(stated)
    if plain is not None:
        return plain
    if block is None:
        return Blocks(None, f"the metadata does not state a block of rows and columns: block_size is {stated!r}")
    if fits(weight, scale, "e4m3", block):
        return Blocks(block)
    return Blocks(None, grid_problem(weight, scale, "e4m3", block))

"""Qwen3.8's n-gram tables: the parts `t.shards.N.weight` (or `t.shard_N.weight`) share one value, `t.weight_scale`."""

from __future__ import annotations

import re

from deepinfer_prep.families.pairing import pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import FP8_DTYPE

_NAME = "shared-table"
_PART = re.compile(r"(?P<table>.+)\.(?:shards\.|shard_)\d+\.weight", re.DOTALL)


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise tables whose scale is one value and whose parts are all fp8."""
    covered = _tables(checkpoint)
    pairs = pair_weights(
        checkpoint,
        quantization,
        lambda name: [covered[name]] if name in covered else [],
        no_kernel_scale="it is a look-up table, not the operand of a GEMM",
    )
    return Layout(_NAME, pairs.weights, pairs.unpaired) if any(pairs) else None


def _tables(checkpoint: Checkpoint) -> dict[str, str]:
    """Part -> the scale of its table, for tables of which all parts are fp8 and the scale is one value."""
    parts: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        match = _PART.fullmatch(name)
        if match is not None:
            parts.setdefault(match["table"] + ".weight_scale", []).append(name)
    return {
        name: scale
        for scale, names in parts.items()
        if scale in checkpoint.tensors and checkpoint.tensors[scale].elements == 1
        if all(checkpoint.tensors[name].dtype == FP8_DTYPE for name in names)
        for name in names
    }

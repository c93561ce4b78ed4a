"""What the config of a checkpoint says about its quantization."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.files.checkpoint import Checkpoint

Block = tuple[int, int]


def stated_block(quantization: Mapping[str, Any]) -> Block | None:
    """`weight_block_size` as rows and columns; None where it is absent or no pair of numbers."""
    return as_block(quantization.get("weight_block_size"))


def as_block(value: Any) -> Block | None:
    """A JSON list of two positive whole numbers as a block, else None."""
    if isinstance(value, list) and len(value) == 2 and all(type(number) is int and number > 0 for number in value):
        return value[0], value[1]
    return None


def states_exponents(quantization: Mapping[str, Any]) -> bool:
    """Whether the config says that U8 scales are e8m0 exponents and not numbers.

    Said by `scale_fmt: ue8m0`, by the MX formats' names, or by blocks of 1x32, which only the MX formats have
    (OCP microscaling specification 1.0).
    """
    return (
        str(quantization.get("scale_fmt", "")).lower() in ("ue8m0", "e8m0")
        or str(quantization.get("quant_method", "")).lower() == "mxfp8"
        or stated_block(quantization) == (1, 32)
    )


def side_file(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """Another JSON file of the checkpoint; empty where it is absent or no JSON object.

    Raises:
        CheckpointError: it is not valid JSON.
    """
    other = next((other for other in checkpoint.others if other.name == name), None)
    if other is None:
        return {}
    try:
        value = json.loads(other.path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{other.path} is not valid JSON ({error}). Fetch it again.") from None
    return value if isinstance(value, dict) else {}

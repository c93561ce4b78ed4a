"""What the config of a checkpoint says about its quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_prep.files.checkpoint import Checkpoint, read_json
from deepinfer_prep.files.untrusted import CONFIG

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
    """Another JSON file of the checkpoint; empty where it is absent.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    other = next((other for other in checkpoint.others if other.name == name), None)
    return read_json(other.path, CONFIG) if other is not None else {}

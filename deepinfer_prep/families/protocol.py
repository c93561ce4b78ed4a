"""What a checkpoint family says of a checkpoint, as data, and the form of the function that says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import FP8_DTYPE, QuantizedWeight


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Why an F8_E4M3 tensor has no scale to go with: "F8_E4M3 tensors that {problem} (N): names. {advice}"."""

    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family reads a checkpoint, or those tensors of it that are the family's."""

    family: str
    weights: tuple[QuantizedWeight, ...] = ()
    unpaired: Mapping[str, Unpaired] = field(default_factory=dict)
    """F8_E4M3 tensors that the family knows and has no usable scale for."""
    markers: tuple[str, ...] = ()
    """F8_E4M3 tensors that hold no values, only tell a loader something; copied."""
    activation_scales: tuple[str, ...] = ()
    """Static scales of e4m3 activations and of an fp8 KV cache."""
    zero_points: tuple[str, ...] = ()
    """Tensors that have to be all zero: halving keeps code x scale and not (code - zero point) x scale."""
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


Family = Callable[[Checkpoint, Quantization], Layout | None]
"""One checkpoint family: says from headers and config which tensors it stores, and how; None where it stores none.

Several families may read different tensors of one checkpoint; a weight that two of them pair with different scales
is not converted.
"""


def fp8_names(checkpoint: Checkpoint) -> list[str]:
    """The names of all F8_E4M3 tensors, in the checkpoint's order: what every pairing starts from."""
    return [name for name, tensor in checkpoint.tensors.items() if tensor.dtype == FP8_DTYPE]

"""What every checkpoint family has to say, as data, and the protocol by which it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import FP8_DTYPE, QuantizedWeight


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Why an F8_E4M3 tensor has no scale to go with: "F8_E4M3 tensors that {problem} (N): names. {advice}"."""

    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family reads a checkpoint, or the part of it that is the family's."""

    family: str
    weights: tuple[QuantizedWeight, ...] = ()
    unpaired: Mapping[str, Unpaired] = field(default_factory=dict)
    """F8_E4M3 tensors that the family knows and has no usable scale for."""
    markers: tuple[str, ...] = ()
    """F8_E4M3 tensors that hold no values, only tell a loader something; copied."""
    activation_scales: tuple[str, ...] = ()
    """Static scales of activations and of the KV cache; halving weights never touches them."""
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Family(Protocol):
    """One checkpoint family; each lives in a file of its own, as `FAMILY`."""

    name: str

    def layout(self, checkpoint: Checkpoint) -> Layout | None:
        """What of a checkpoint is of this family, from headers and config alone; None where nothing is.

        Several families may read parts of one checkpoint; where two pair a weight with different scales,
        the weight is refused.
        """


def fp8_names(checkpoint: Checkpoint) -> list[str]:
    """The names of all F8_E4M3 tensors, in the checkpoint's order: what every pairing starts from."""
    return [name for name, tensor in checkpoint.tensors.items() if tensor.dtype == FP8_DTYPE]

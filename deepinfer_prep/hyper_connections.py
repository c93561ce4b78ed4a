"""Which matrices are split into bf16 halves: the fp32 hyper-connection mixing matrices of DeepSeek-V4.

The Neuron compiler narrows fp32 matmul operands to bf16, so a graph needs the two halves from outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_prep.checkpoint import Checkpoint
from deepinfer_prep.container import TensorInfo

SPLIT_SUFFIXES = ("hc_attn_fn", "hc_ffn_fn")


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """The matrices that get `.hi` and `.lo`, and what the user should hear about the others."""

    names: tuple[str, ...]
    warnings: tuple[str, ...]


def choose_split(checkpoint: Checkpoint) -> SplitChoice:
    """Choose every 2-D F32 tensor whose name ends in one of `SPLIT_SUFFIXES`; report look-alikes."""
    names, narrowed, unsplit = [], [], []
    for name, tensor in checkpoint.tensors.items():
        if not _is_mixing_matrix(tensor):
            continue
        if tensor.dtype != "F32":
            narrowed.append(name)
        elif name.endswith(SPLIT_SUFFIXES):
            names.append(name)
        else:
            unsplit.append(name)
    return SplitChoice(tuple(names), _narrowed_warning(checkpoint, narrowed) + _unsplit_warning(unsplit))


def _is_mixing_matrix(tensor: TensorInfo) -> bool:
    return len(tensor.shape) == 2 and tensor.name.endswith("fn") and "hc" in tensor.name


def _narrowed_warning(checkpoint: Checkpoint, names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    found = checkpoint.tensors[names[0]].dtype
    return (
        f"{checkpoint.where(names[0])}: expected F32, found {found}: precision is already lost. "
        f"{len(names):,} hyper-connection matrices are copied and not split; use a checkpoint that keeps them in F32.",
    )


def _unsplit_warning(names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (
        f"{len(names):,} fp32 matrices look like hyper-connection matrices but were not split: "
        + ", ".join(names[:5])
        + (f" and {len(names) - 5:,} more." if len(names) > 5 else "."),
    )

"""Which matrices are split into bf16 halves: fp32 hyper-connection mixing matrices, and those that --split names.

The Neuron compiler narrows fp32 matmul operands to bf16, so a graph needs the two halves from outside.
DeepSeek-V4.1's matrices are split by their names; V4's `hc_head_fn`, transformers' `attn_hc.fn` and other
models' are only reported, because a graph that does not expect the halves gains nothing from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer_prep.errors import Reason, list_some
from deepinfer_prep.families.patterns import compile_pattern
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.naming import SPLIT_SUFFIXES

_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """The matrices that get `.hi` and `.lo`, and what the user should hear about the others."""

    names: tuple[str, ...]
    warnings: tuple[str, ...]
    refusals: tuple[Reason, ...]


def choose_split(checkpoint: Checkpoint, patterns: Iterable[str] = ()) -> SplitChoice:
    """Choose the 2-D F32 tensors whose name ends in one of `SPLIT_SUFFIXES` or matches a pattern; report look-alikes.

    A pattern that matches nothing, or something that is no F32 matrix, is a refusal.
    """
    asked: set[str] = set()
    refusals: list[Reason] = []
    for pattern in patterns:
        found, problem = _matching(checkpoint, pattern)
        asked |= found
        refusals += [Reason(problem, "bad-split-pattern")] if problem else []
    chosen = {
        name: None
        for name, tensor in checkpoint.tensors.items()
        if _is_f32_matrix(tensor) and (name.endswith(SPLIT_SUFFIXES) or name in asked)
    }
    left = [
        tensor
        for name, tensor in checkpoint.tensors.items()
        if len(tensor.shape) >= 2 and name not in chosen and _is_candidate(name)
    ]
    return SplitChoice(tuple(chosen), _narrowed_warning(checkpoint, left) + _unsplit_warning(left), tuple(refusals))


def _is_candidate(name: str) -> bool:
    """Whether a name looks like a hyper-connection matrix's: hc...fn in its last two parts, or the full word."""
    if "hyper_connection" in name or "hyperconnection" in name:
        return True
    ends = ".".join(name.removesuffix(".weight").rsplit(".", 2)[-2:])
    return ends.endswith("fn") and "hc" in ends[:-2]


def _matching(checkpoint: Checkpoint, pattern: str) -> tuple[set[str], str]:
    compiled = compile_pattern(pattern)
    found = {name for name in checkpoint.tensors if compiled.fullmatch(name)}
    if not found:
        return found, f"--split {pattern} matches no tensor. Compare the pattern with the names in the checkpoint."
    wrong = next(
        (name for name in checkpoint.tensors if name in found and not _is_f32_matrix(checkpoint.tensors[name])), ""
    )
    if not wrong:
        return found, ""
    tensor = checkpoint.tensors[wrong]
    return found, (
        f"--split {pattern} matches {checkpoint.where(wrong)}, which is {tensor.dtype} {list(tensor.shape)}: only F32 "
        "matrices of two dimensions have bf16 halves to split into. Make the pattern narrower."
    )


def _is_f32_matrix(tensor: TensorInfo) -> bool:
    return tensor.dtype == "F32" and len(tensor.shape) == 2


def _narrowed_warning(checkpoint: Checkpoint, left: list[TensorInfo]) -> tuple[str, ...]:
    """Matrices that the split would have taken, but for their dtype or shape."""
    narrowed = [
        tensor for tensor in left if tensor.dtype != "F32" and "hc" in tensor.name and tensor.name.endswith("fn")
    ]
    if not narrowed:
        return ()
    return (
        f"{checkpoint.where(narrowed[0].name)}: expected F32, found {narrowed[0].dtype}: precision is already lost. "
        f"{len(narrowed):,} hyper-connection matrices are copied and not split; use a checkpoint that keeps them in "
        "F32.",
    )


def _unsplit_warning(left: list[TensorInfo]) -> tuple[str, ...]:
    unsplit = [tensor for tensor in left if tensor.dtype == "F32"]
    if not unsplit:
        return ()
    listed = list_some(unsplit, _MOST_NAMES, lambda tensor: f"{tensor.name} {list(tensor.shape)}")
    return (
        f"{len(unsplit):,} fp32 matrices look like hyper-connection matrices but were not split: {listed}. "
        "If a graph takes their bf16 halves, name them with --split PATTERN.",
    )

"""The safety rules that headers can decide: what stops a conversion before anything is written."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_prep.checkpoint import Checkpoint
from deepinfer_prep.container import TensorInfo
from deepinfer_prep.formats import Layout

MANIFEST_NAME = "neuron_manifest.json"
SIDECAR_PREFIX = "neuron-"
SIDECAR_INDEX = "neuron.safetensors.index.json"

_FOREIGN_FP8 = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
_MOST_NAMES = 20


def refuse(checkpoint: Checkpoint, layout: Layout) -> tuple[str, ...]:
    """Every refusal as a whole sentence; empty where the conversion may start."""
    return (
        *_already_converted(checkpoint),
        *layout.refusals,
        *_unscaled(checkpoint, layout),
        *_foreign_fp8(checkpoint),
        *_shared_scales(checkpoint, layout),
        *_name_clashes(checkpoint),
    )


def _already_converted(checkpoint: Checkpoint) -> Iterator[str]:
    for shard in checkpoint.shards:
        version = shard.header.metadata.get("deepinfer_prep")
        if version is not None:
            yield (
                f"{shard.path} was already converted by deepinfer-prep {version}: converting it again would halve "
                "its weights a second time. Give the original checkpoint."
            )
            return
    if any(other.name == MANIFEST_NAME for other in checkpoint.others):
        yield (
            f"{checkpoint.root / MANIFEST_NAME} says that this folder is already an output of deepinfer-prep. "
            "Give the original checkpoint."
        )


def _unscaled(checkpoint: Checkpoint, layout: Layout) -> Iterator[str]:
    if layout.refusals:
        return
    paired = {quantized.weight for quantized in layout.weights}
    names = [
        tensor.name for tensor in checkpoint.tensors.values() if tensor.dtype == "F8_E4M3" and tensor.name not in paired
    ]
    if not names:
        return
    near = _near_misses(checkpoint, names[0])
    yield (
        f"{len(names):,} F8_E4M3 tensors have no scale: {_listed(checkpoint, names)}. "
        "Without its scale a halved weight is half as large. "
        + (f"Names beside the first that look like a scale: {', '.join(near)}. " if near else "")
        + "If the scales lie in a file that was not downloaded, fetch it. `inspect --scan` tells whether any code lies "
        "above 240; where none does, the bytes mean the same on the hardware."
    )


def _near_misses(checkpoint: Checkpoint, weight: str) -> list[str]:
    stem = weight.rpartition(".")[0]
    return [
        name
        for name in checkpoint.tensors
        if name != weight and name.startswith(stem) and "scale" in name[len(stem) :].lower()
    ][:5]


def _foreign_fp8(checkpoint: Checkpoint) -> Iterator[str]:
    names = [tensor.name for tensor in checkpoint.tensors.values() if tensor.dtype in _FOREIGN_FP8]
    if names:
        yield (
            f"{len(names):,} tensors have an fnuz fp8 dtype: {_listed(checkpoint, names)}. Trainium2 has no such type "
            "and its codes differ from e4m3fn in bias and NaN. Use the e4m3fn form of the checkpoint."
        )


def _shared_scales(checkpoint: Checkpoint, layout: Layout) -> Iterator[str]:
    """A scale that is doubled for an e4m3 weight must not also scale a weight that is not halved."""
    doubled = {quantized.scale: quantized.weight for quantized in layout.weights if quantized.element == "e4m3"}
    for quantized in layout.weights:
        if quantized.element != "e4m3" and quantized.scale in doubled:
            yield (
                f"{checkpoint.where(quantized.scale)} scales the e4m3 weight {doubled[quantized.scale]!r} and the "
                f"{quantized.element} weight {quantized.weight!r}: it cannot be doubled for one of them only."
            )


def _name_clashes(checkpoint: Checkpoint) -> Iterator[str]:
    names = [shard.name for shard in checkpoint.shards] + [other.name for other in checkpoint.others]
    for name in names:
        if name == SIDECAR_INDEX or (name.startswith(SIDECAR_PREFIX) and name.endswith(".safetensors")):
            yield (
                f"{checkpoint.root / name} has a name that the output needs for its own files. "
                "Rename it, and in the index as well."
            )


def _listed(checkpoint: Checkpoint, names: list[str]) -> str:
    def show(tensor: TensorInfo) -> str:
        return f"{tensor.name!r} in {checkpoint.shards[checkpoint.shard_of[tensor.name]].name}"

    listed = ", ".join(show(checkpoint.tensors[name]) for name in names[:_MOST_NAMES])
    return listed + (f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else "")

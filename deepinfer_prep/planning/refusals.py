"""The safety rules that headers can decide: what stops a conversion before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from deepinfer_prep.errors import Reason, list_some
from deepinfer_prep.families import Layout
from deepinfer_prep.families.combine import NO_SCALE
from deepinfer_prep.families.protocol import Unpaired
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.naming import (
    HI_SUFFIX,
    KERNEL_SCALE_SUFFIX,
    LAID_OUT_SUFFIX,
    LO_SUFFIX,
    MANIFEST_NAME,
    SHARD_SUFFIX,
    SIDECAR_FOLDER,
    SIDECAR_INDEX,
    SIDECAR_PREFIX,
)
from deepinfer_prep.options import Options
from deepinfer_prep.planning.suggestion import suggest_map

_FOREIGN_FP8 = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
_MOST_NAMES = 10
_MOST_NEAR = 5
_SCALE_LIKE = re.compile("scal|scl|_sf$|_inv|factor|amax", re.IGNORECASE)


def find_refusals(
    checkpoint: Checkpoint, layout: Layout, options: Options, split: Iterable[str], laid_out: Iterable[str]
) -> tuple[Reason, ...]:
    """The reasons, each of whole sentences with a code, why a conversion must not start; empty where it may."""
    return (
        *_coded("already-converted", _already_converted(checkpoint)),
        *_coded("family", layout.refusals),
        *_unscaled(checkpoint, layout, options),
        *_coded("foreign-fp8", _foreign_fp8(checkpoint)),
        *_coded("shared-scale", _shared_scales(checkpoint, layout)),
        *_coded("file-name-taken", _file_clashes(checkpoint)),
        *_coded("tensor-name-taken", _tensor_clashes(checkpoint, layout, split, laid_out)),
        *_coded("split-of-scale", _split_scales(checkpoint, layout, split)),
    )


def _coded(code: str, sentences: Iterable[str]) -> Iterator[Reason]:
    return (Reason(sentence, code) for sentence in sentences)


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


def _unscaled(checkpoint: Checkpoint, layout: Layout, options: Options) -> Iterator[Reason]:
    """One sentence for every reason why fp8 tensors have no scale, each naming its tensors."""
    if options.unscaled == "copy-if-safe":
        return
    groups: dict[Unpaired, list[str]] = {}
    for name, reason in layout.unpaired.items():
        groups.setdefault(reason, []).append(name)
    for reason, names in groups.items():
        near = _near_misses(checkpoint, names[0]) if reason is NO_SCALE else []
        suggestion = suggest_map(checkpoint, names, near) if near else None
        found = f"F8_E4M3 tensors that {reason.problem} ({len(names):,}): {_listed(checkpoint, names)}. " + (
            f"Names beside the first that look like a scale: {', '.join(near)}. " if near else ""
        )
        if suggestion is not None:
            yield Reason(
                f"{found}If these multiply the weights, --map '{suggestion.text}' pairs {suggestion.pairs:,} of the "
                f"{len(names):,}.",
                "scale-by-another-name",
            )
        else:
            yield Reason(
                f"{found}{reason.advice} Where no code lies above 240 the bytes mean the same on the hardware: "
                "`inspect --scan` tells, and --unscaled copy-if-safe copies such tensors exactly.",
                "fp8-without-scale",
            )


def _near_misses(checkpoint: Checkpoint, weight: str) -> list[str]:
    """Names that look like a weight's scale: in its module, else in one above, else under another prefix."""
    named = [name for name in checkpoint.tensors if name != weight and _SCALE_LIKE.search(name.rpartition(".")[2])]
    parts = weight.split(".")[:-1]
    module = ".".join(parts)
    found = [name for name in named if name.rpartition(".")[0] == module or name.startswith(weight)]
    # What lies above or elsewhere has to name a weight: modules above have scales of many other things.
    of_weights = [name for name in named if "weight" in name.rpartition(".")[2]]
    for depth in (len(parts) - 1, len(parts) - 2):
        above = ".".join(parts[: max(0, depth)])
        found = found or [name for name in of_weights if above and name.rpartition(".")[0] == above]
    tail = ".".join(parts[-3:])
    elsewhere = [name for name in of_weights if "." in tail and name.rpartition(".")[0].endswith(tail)]
    return (found or elsewhere)[:_MOST_NEAR]


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


def _file_clashes(checkpoint: Checkpoint) -> Iterator[str]:
    names = [shard.name for shard in checkpoint.shards] + [other.name for other in checkpoint.others]
    for name in names:
        is_sidecar_file = name.startswith(SIDECAR_PREFIX) and name.endswith(SHARD_SUFFIX)
        if name in (SIDECAR_FOLDER, SIDECAR_INDEX) or is_sidecar_file:
            yield (
                f"{checkpoint.root / name} has a name that the output needs for its own files. "
                "Rename it, and in the index as well."
            )


def _tensor_clashes(
    checkpoint: Checkpoint, layout: Layout, split: Iterable[str], laid_out: Iterable[str]
) -> Iterator[str]:
    """The output's own tensors must not have the name of a tensor of the checkpoint."""
    halves = (name + suffix for name in split for suffix in (HI_SUFFIX, LO_SUFFIX))
    scales = (quantized.weight + KERNEL_SCALE_SUFFIX for quantized in layout.weights)
    weights = (name + LAID_OUT_SUFFIX for name in laid_out)
    taken = [name for name in (*halves, *scales, *weights) if name in checkpoint.tensors]
    if taken:
        yield (
            f"{len(taken):,} tensors have names that the output needs for its own: {_listed(checkpoint, taken)}. "
            "This looks like an output of another conversion; give the original checkpoint."
        )


def _split_scales(checkpoint: Checkpoint, layout: Layout, split: Iterable[str]) -> Iterator[str]:
    """A scale may be doubled and is read as a scale: halves of it would mean nothing."""
    scales = {quantized.scale for quantized in layout.weights} | {*layout.activation_scales}
    taken = [name for name in split if name in scales]
    if taken:
        yield (
            f"--split would split scales ({len(taken):,}): {_listed(checkpoint, taken)}. Only matrices of the model "
            "itself have halves that a graph takes. Make the pattern narrower."
        )


def _listed(checkpoint: Checkpoint, names: list[str]) -> str:
    def show(name: str) -> str:
        return f"{name!r} in {checkpoint.shards[checkpoint.shard_of[name]].name}"

    return list_some(names, _MOST_NAMES, show) + (" (`inspect --json` lists all)" if len(names) > _MOST_NAMES else "")

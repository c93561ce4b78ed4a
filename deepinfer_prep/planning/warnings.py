"""What a user should know about a conversion although nothing stands in its way."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_prep.families import Layout
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import read_header
from deepinfer_prep.kernel_scale import KERNEL_COLUMNS, KERNEL_ROWS, Absent, PlannedWeight, is_outside_kernels
from deepinfer_prep.naming import SHARD_SUFFIX
from deepinfer_prep.options import Options

_KV_CACHE_SCALES = "kv_cache_scales.json"
"""Older vLLM's file of scales for an fp8 KV cache (its option quantization_param_path)."""


def find_warnings(
    checkpoint: Checkpoint, layout: Layout, weights: tuple[PlannedWeight, ...], options: Options
) -> tuple[str, ...]:
    """Every warning that headers and options give, each of whole sentences."""
    return (
        *_nothing_to_do(layout),
        *_block_problems(checkpoint, weights),
        *_outside_kernels(checkpoint, weights),
        *_activation_scales(layout, options),
        *_unscaled(layout, options),
        *_markers(layout),
        *_repeated_scales(checkpoint, layout, options),
        *_scales_of_a_cache(checkpoint),
    )


def _nothing_to_do(layout: Layout) -> Iterator[str]:
    if not layout.weights and not layout.refusals and not layout.unpaired:
        yield "nothing is quantized in a way that needs converting: every tensor is copied as it is."


def _block_problems(checkpoint: Checkpoint, weights: tuple[PlannedWeight, ...]) -> Iterator[str]:
    """Where config and scale grid disagree: never resolved by dividing shapes, always told."""
    found = [weight.quantized for weight in weights if weight.quantized.block_problem]
    if found:
        yield (
            f"{len(found):,} weights have no known block size, {checkpoint.where(found[0].weight)} among them: "
            f"{found[0].block_problem}. They are converted all the same, without a kernel scale."
        )


def _outside_kernels(checkpoint: Checkpoint, weights: tuple[PlannedWeight, ...]) -> Iterator[str]:
    found = [
        checkpoint.tensors[weight.quantized.weight]
        for weight in weights
        if not isinstance(weight.kernel_scale, Absent)
        and is_outside_kernels(checkpoint.tensors[weight.quantized.weight], weight.quantized.element)
    ]
    if found:
        yield (
            f"{len(found):,} weights have a shape outside the kernels' limits (rows a multiple of {KERNEL_ROWS}, "
            f"columns of {KERNEL_COLUMNS}), {found[0].name} {list(found[0].shape)} among them: they are converted, "
            "but no kernel takes them."
        )


def _activation_scales(layout: Layout, options: Options) -> Iterator[str]:
    if not layout.activation_scales:
        return
    count = f"{len(layout.activation_scales):,} static activation or KV-cache scales are"
    if options.activation_scales == "double":
        yield (
            f"{count} doubled, {layout.activation_scales[0]} among them: activations calibrated to 448 stay within "
            "224, and every reader that quantizes and dequantizes with the stored scales computes the same numbers. "
            "--activation-scales keep leaves them as they are."
        )
    else:
        yield (
            f"{count} kept, {layout.activation_scales[0]} among them. Activations quantized with a scale calibrated to "
            "448 overflow a type that ends at 240: quantize activations dynamically or recalibrate; without "
            "--activation-scales keep they are doubled."
        )


def _unscaled(layout: Layout, options: Options) -> Iterator[str]:
    if layout.unpaired and options.unscaled == "copy-if-safe":
        yield (
            f"{len(layout.unpaired):,} fp8 tensors without a scale, {next(iter(layout.unpaired))} among them, are "
            "copied as they are if no code in them lies above 240; one that does stops the run before anything is "
            "written."
        )


def _markers(layout: Layout) -> Iterator[str]:
    if layout.markers:
        yield (
            f"{len(layout.markers):,} fp8 tensors are markers without values and are copied, "
            f"{layout.markers[0]} among them."
        )


def _repeated_scales(checkpoint: Checkpoint, layout: Layout, options: Options) -> Iterator[str]:
    """Files beside the shards are copied as they are, also where they repeat a scale that is doubled in a shard."""
    doubled = {weight.scale for weight in layout.weights if weight.element == "e4m3"}
    doubled |= {*layout.activation_scales} if options.activation_scales == "double" else set()
    for other in checkpoint.others:
        if other.name.endswith(SHARD_SUFFIX):
            repeated = [tensor.name for tensor in read_header(other.path).tensors if tensor.name in doubled]
            if repeated:
                yield (
                    f"{other.name} is copied as it is and repeats {len(repeated):,} scales that are doubled in the "
                    f"shards, {repeated[0]} among them: readers that take its values are off by 2. Remove it from the "
                    "output, or double its values."
                )


def _scales_of_a_cache(checkpoint: Checkpoint) -> Iterator[str]:
    for other in checkpoint.others:
        if other.name.rpartition("/")[2] == _KV_CACHE_SCALES:
            yield (
                f"{other.name} is copied as it is: its scales fit a KV cache of e4m3fn, which ends at 448. For a cache "
                "in the hardware's e4m3, which ends at 240, double its values or leave the file out."
            )

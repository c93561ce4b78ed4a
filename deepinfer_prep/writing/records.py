"""What the manifest says of a finished conversion, put together from the plan and from what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deepinfer_prep import kernel_layout
from deepinfer_prep.files.segments import segments
from deepinfer_prep.files.storage import StoredPlace
from deepinfer_prep.kernel_scale import Absent, PlannedWeight, Stored
from deepinfer_prep.manifest import (
    FORMAT_VERSION,
    LAID_OUT_FORMAT_VERSION,
    Counts,
    FileRecord,
    LayoutRecord,
    Manifest,
    SplitRecord,
    WeightRecord,
)
from deepinfer_prep.naming import HI_SUFFIX, KERNEL_SCALE_SUFFIX, LO_SUFFIX
from deepinfer_prep.planning.plan import Plan
from deepinfer_prep.writing.journal import SegmentDone
from deepinfer_prep.writing.output_bytes import Tally


def weight_records(plan: Plan, weights: Iterable[PlannedWeight]) -> dict[str, WeightRecord]:
    """The record of every quantized weight, by its name; `weights` as `choose_contents` returns them."""
    return {
        name: replace(
            _weight_record(weight),
            layout=_layout_record(plan, name),
            scale_layout=_layout_record(plan, weight.quantized.scale),
        )
        for weight in weights
        for name in (weight.quantized.weight,)
    }


def _layout_record(plan: Plan, name: str) -> LayoutRecord | None:
    if name not in plan.laid_out:
        return None
    tensor = plan.checkpoint.tensors[name]
    return LayoutRecord(kernel_layout.LAYOUT_NAME, kernel_layout.LAYOUT_VERSION, tensor.dtype, tensor.shape)


def _weight_record(weight: PlannedWeight) -> WeightRecord:
    quantized, kernel_scale = weight.quantized, weight.kernel_scale
    if isinstance(kernel_scale, Absent):
        return WeightRecord(quantized.element, quantized.block, quantized.scale, None, kernel_scale.reason)
    is_stored = isinstance(kernel_scale, Stored)
    name = quantized.scale if is_stored else quantized.weight + KERNEL_SCALE_SUFFIX
    return WeightRecord(quantized.element, quantized.block, quantized.scale, name)


def build_manifest(
    plan: Plan,
    tool_version: str,
    weights: Iterable[PlannedWeight],
    results: Mapping[tuple[str, int], SegmentDone],
    sidecar_names: Iterable[str],
    sidecar_records: Mapping[str, FileRecord],
) -> Manifest:
    """Put the manifest of a finished output together."""
    total = Tally()
    for done in results.values():
        total.add(done.tally)
    files = {file.name: _file_record(file.name, file.size, results) for file in plan.files}
    return describe(plan, tool_version, weights, total, sidecar_names, {**files, **sidecar_records})


def describe(
    plan: Plan,
    tool_version: str,
    weights: Iterable[PlannedWeight],
    total: Tally,
    sidecar_names: Iterable[str],
    files: Mapping[str, FileRecord],
) -> Manifest:
    """The manifest of an output with these files."""
    return Manifest(
        format_version=LAID_OUT_FORMAT_VERSION if plan.laid_out else FORMAT_VERSION,
        tool_version=tool_version,
        family=plan.family,
        source_fingerprint=plan.fingerprint,
        options=plan.options.to_json(),
        counts=Counts(total.counts.rounded, total.counts.nan, total.counts.above_240),
        nan_tensors=dict(sorted(total.nan_codes.items())),
        shards=tuple(shard.name for shard in plan.checkpoint.shards),
        sidecar=tuple(sidecar_names),
        activation_scales=plan.activation_scales,
        unscaled=plan.unscaled,
        split={name: SplitRecord(name + HI_SUFFIX, name + LO_SUFFIX) for name in plan.split},
        weights=weight_records(plan, weights),
        files=files,
        source_url=plan.checkpoint.root.pinned_url if isinstance(plan.checkpoint.root, StoredPlace) else "",
    )


def _file_record(name: str, size: int, results: Mapping[tuple[str, int], SegmentDone]) -> FileRecord:
    count = len(list(segments(size)))
    return FileRecord(size, tuple(results[name, number].digest for number in range(count)))

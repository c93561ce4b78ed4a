"""What follows from a plan and the finished main shards: sidecar, kernel-scale records, manifest.

`convert` writes it and `verify --source` compares with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass

from deepinfer_prep import fp8
from deepinfer_prep.files.container import Location
from deepinfer_prep.files.segments import segments
from deepinfer_prep.files.storage import Readers
from deepinfer_prep.kernel_scale import PlannedWeight
from deepinfer_prep.manifest import FORMAT_VERSION, Counts, FileRecord, Manifest, SplitRecord, WeightRecord
from deepinfer_prep.naming import HI_SUFFIX, LO_SUFFIX, MARKER, MAX_MARKER, SIDECAR_PREFIX
from deepinfer_prep.planning.plan import Plan
from deepinfer_prep.writing import sidecar
from deepinfer_prep.writing.journal import SegmentDone
from deepinfer_prep.writing.output_bytes import Tally
from deepinfer_prep.writing.sidecar import SidecarFile, SidecarTensor

Locate = Callable[[str], Location]
"""Finds a tensor of the finished main shards."""


@dataclass(frozen=True, slots=True)
class Derived:
    """The sidecar's tensors, and for every quantized weight what the manifest says of it."""

    tensors: tuple[SidecarTensor, ...]
    weights: Mapping[str, WeightRecord]


def derive_all(plan: Plan, locate: Locate) -> Derived:
    """Decide for every split matrix and every weight what the sidecar holds; reads scales, not weights."""
    tensors: list[SidecarTensor] = []
    for name in plan.split:
        tensors += sidecar.halves(name, locate(name))
    weights = {}
    with closing(Readers()) as readers:
        for weight in plan.weights:
            found = _kernel_scale(weight, locate, readers)
            if isinstance(found, SidecarTensor):
                tensors.append(found)
            weights[weight.quantized.weight] = _record(weight, found)
    return Derived(tuple(tensors), weights)


def _kernel_scale(weight: PlannedWeight, locate: Locate, readers: Readers) -> SidecarTensor | str:
    name, derived = weight.quantized.weight, weight.kernel_scale.derived
    if derived is None:
        return weight.kernel_scale.reason
    return sidecar.kernel_scale(name, locate(weight.quantized.scale), derived, readers)


def _record(weight: PlannedWeight, found: SidecarTensor | str) -> WeightRecord:
    quantized = weight.quantized
    stored = quantized.scale if weight.kernel_scale.stored else None
    name = found.name if isinstance(found, SidecarTensor) else stored
    reason = "" if isinstance(found, SidecarTensor) else found
    return WeightRecord(quantized.element, quantized.block, quantized.scale, name, reason)


def sidecar_files(derived: Derived, tool_version: str) -> list[SidecarFile]:
    """Lay the sidecar's tensors out in files."""
    metadata = {"format": "pt", MARKER: tool_version, MAX_MARKER: str(fp8.FP8_MAX)}
    return sidecar.lay_out(derived.tensors, metadata, SIDECAR_PREFIX)


def build_manifest(
    plan: Plan,
    tool_version: str,
    derived: Derived,
    results: Mapping[tuple[str, int], SegmentDone],
    sidecar_names: Iterable[str],
    sidecar_records: Mapping[str, FileRecord],
) -> Manifest:
    """Put the manifest of a finished output together."""
    total = Tally()
    for done in results.values():
        total.add(done.tally)
    files = {file.name: _file_record(file.name, file.size, results) for file in plan.files}
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version=tool_version,
        family=plan.family,
        source_fingerprint=plan.fingerprint,
        options=plan.options.to_json(),
        counts=Counts(total.counts.rounded, total.counts.nan, total.counts.misread),
        nan_tensors=dict(sorted(total.nan_codes.items())),
        shards=tuple(shard.name for shard in plan.checkpoint.shards),
        sidecar=tuple(sidecar_names),
        activation_scales=plan.activation_scales,
        unscaled=plan.unscaled,
        split={name: SplitRecord(name + HI_SUFFIX, name + LO_SUFFIX) for name in plan.split},
        weights=derived.weights,
        files={**files, **sidecar_records},
    )


def _file_record(name: str, size: int, results: Mapping[tuple[str, int], SegmentDone]) -> FileRecord:
    count = len(list(segments(size)))
    return FileRecord(size, tuple(results[name, number].digest for number in range(count)))

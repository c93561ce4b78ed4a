"""Compares the records in a manifest with those that a new plan of the source gives. Bytes are compared elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_prep.checking.findings import Difference
from deepinfer_prep.checking.structure import OpenOutput
from deepinfer_prep.manifest import Counts, Manifest
from deepinfer_prep.naming import MANIFEST_NAME, SIDECAR_INDEX
from deepinfer_prep.planning.plan import Plan
from deepinfer_prep.writing import sidecar
from deepinfer_prep.writing.output_bytes import Tally
from deepinfer_prep.writing.records import weight_records


def compare_with_source(output: OpenOutput, manifest: Manifest, plan: Plan) -> Iterator[Difference]:
    """Files, sizes, weights, splits and counts that the source's plan gives, against the manifest's."""
    if plan.fingerprint != manifest.source_fingerprint:
        yield Difference(MANIFEST_NAME, f"the output was converted from another checkpoint than {plan.checkpoint.root}")
    for refusal in plan.refusals:
        yield Difference(MANIFEST_NAME, f"convert would refuse this source with these options: {refusal}")
    planned = {file.name: file.size for file in plan.files}
    held = output.main.keys() | {one.name for stored, one in manifest.laid_out.items() if stored in output.main}
    if not {weight.quantized.scale for weight in plan.weights} | set(plan.split) <= held:
        yield Difference(MANIFEST_NAME, "tensors of the source are missing, so its sidecar cannot be compared")
        return
    contents = sidecar.choose_contents(plan, lambda name: output.main[name])
    planned |= {file.name: file.size for file in sidecar.lay_out(contents.tensors, manifest.tool_version)}
    recorded = {name: record.size for name, record in manifest.files.items() if name != SIDECAR_INDEX}
    for name in sorted(planned.keys() | recorded.keys()):
        if planned.get(name) != recorded.get(name):
            problem = f"the source gives {_size(planned.get(name))}, the manifest says {_size(recorded.get(name))}"
            yield Difference(name, problem)
    weights = weight_records(plan, contents.weights)
    for name in sorted(weights.keys() | manifest.weights.keys()):
        if weights.get(name) != manifest.weights.get(name):
            yield Difference(MANIFEST_NAME, "the record of this weight is not what the source gives", name)
    if manifest.family != plan.family:
        yield Difference(MANIFEST_NAME, f"the family is {manifest.family!r}, that of the source {plan.family!r}")
    if set(manifest.shards) != {shard.name for shard in plan.checkpoint.shards}:
        yield Difference(MANIFEST_NAME, "the shards are not those of the source")
    if set(manifest.unscaled) != set(plan.unscaled):
        yield Difference(MANIFEST_NAME, "the fp8 tensors without a scale are not those of the source")
    if set(manifest.activation_scales) != set(plan.activation_scales):
        yield Difference(MANIFEST_NAME, "the static activation scales are not those of the source")
    if set(manifest.split) != set(plan.split):
        yield Difference(MANIFEST_NAME, "the split matrices are not those of the source")


def compare_counts(manifest: Manifest, found: Tally) -> Iterator[Difference]:
    """What the manifest counts of the source's codes, against what the source holds."""
    counted = Counts(found.counts.rounded, found.counts.nan, found.counts.above_240).to_json()
    for name, expected in counted.items():
        stated = manifest.counts.to_json()[name]
        if stated != expected:
            yield Difference(MANIFEST_NAME, f"counts {stated:,} codes as {name}, the source holds {expected:,}")
    if dict(manifest.nan_tensors) != found.nan_codes:
        yield Difference(MANIFEST_NAME, "the NaN codes by tensor are not those of the source")


def _size(size: int | None) -> str:
    return "no such file" if size is None else f"{size:,} bytes"

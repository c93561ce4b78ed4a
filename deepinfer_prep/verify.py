"""Verifies a finished output against its manifest and, where it is given, its source.

Every file is read once, in parallel, segment by segment: digests and fp8 codes are checked on the same bytes,
and with a source each byte is recomputed by the converter's own plan. Scales are checked to be finite and
the sidecar is recomputed from the main shards.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from deepinfer_prep.checking.findings import Difference, Findings
from deepinfer_prep.checking.records import compare_counts, compare_with_source
from deepinfer_prep.checking.scales import check_scales
from deepinfer_prep.checking.segments import CheckSegment, FileChecks, LaidOut, SegmentFindings
from deepinfer_prep.checking.sidecar import check_sidecar
from deepinfer_prep.checking.structure import OpenOutput, check_output, is_readable
from deepinfer_prep.engines.engine import Engine
from deepinfer_prep.engines.threads import Threads
from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.checkpoint import Checkpoint, open_checkpoint
from deepinfer_prep.files.storage import FileState, Place, absolute
from deepinfer_prep.manifest import Manifest, read_manifest
from deepinfer_prep.naming import MANIFEST_NAME, MARKER
from deepinfer_prep.options import Options
from deepinfer_prep.planning.plan import OutputFile, Plan, plan_conversion
from deepinfer_prep.remote.places import to_place
from deepinfer_prep.workers import DEFAULT_CHUNK_BYTES, Meter, ProgressCallback, default_workers
from deepinfer_prep.writing.output_bytes import Tally


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """What was read and what was found; `differences` counts all, `first` describes the first of them."""

    output: Place
    source: Place | None
    family: str
    files: int
    tensors: int
    quantized_weights: int
    sidecar_tensors: int
    bytes_read: int
    """Bytes of the output whose digests were computed."""
    nan_codes: int
    """NaN codes in the output's fp8 weights."""
    options: Mapping[str, Any]
    """What the output says of the options that it was made with, but for defaults; only its own manifest says so."""
    differences: int
    first: tuple[Difference, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return self.differences == 0


def verify_checkpoint(
    output: Place | str,
    *,
    source: Place | str | None = None,
    workers: int | None = None,
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    follow_links: bool = False,
    engine: Engine | None = None,
    progress: ProgressCallback | None = None,
) -> VerificationResult:
    """Verify a finished output; with `source`, recompute every byte of it as well.

    Memory is `workers` x `chunk_size` bytes of buffers, whatever the model's size. An `engine` such as that of
    `engines.ray_engine.connect` reads the segments in place of `workers` threads.

    Raises:
        ManifestError: `output` is not a finished output, or one of another format version.
        PrepError, OSError: the source cannot be read; differences of the output itself are findings.
    """
    started = time.monotonic()
    output, source = to_place(output), None if source is None else to_place(source)
    if engine is not None and engine.is_remote:
        output, source = absolute(output), None if source is None else absolute(source)
    manifest = read_manifest(output)
    original = None if source is None else _open_original(source, follow_links)
    findings = Findings()
    opened, structural = check_output(output, manifest)
    for difference in structural:
        findings.add(difference)
    plan = None
    if original is not None:
        plan = plan_conversion(original, _options(manifest), manifest.tool_version)
    engine = engine or Threads(workers or default_workers(output, source))
    nan_codes = _check_segments(opened, manifest, plan, findings, engine, chunk_size, progress)
    for difference in check_scales(opened, manifest):
        findings.add(difference)
    for difference in check_sidecar(opened, manifest):
        findings.add(difference)
    if plan is not None:
        for difference in compare_with_source(opened, manifest, plan):
            findings.add(difference)
    return VerificationResult(
        output=output,
        source=source,
        family=manifest.family,
        files=len(manifest.files),
        tensors=len(opened.main),
        quantized_weights=len(manifest.weights),
        sidecar_tensors=len(opened.in_sidecar),
        bytes_read=sum(record.size for record in manifest.files.values()),
        nan_codes=nan_codes,
        options=_chosen(manifest),
        differences=findings.count,
        first=tuple(findings.first),
        seconds=time.monotonic() - started,
    )


def _open_original(source: Place, follow_links: bool) -> Checkpoint:
    """The checkpoint that an output was converted from; another output cannot be it, whatever it holds."""
    checkpoint = open_checkpoint(source, follow_links)
    if any(MARKER in shard.header.metadata for shard in checkpoint.shards):
        raise PrepError(
            f"{source} is itself an output of deepinfer-prep, and not what {MANIFEST_NAME} was written for. Give the "
            "original checkpoint as --source; without --source the output is checked by itself.",
            code="already-converted",
        )
    return checkpoint


def _options(manifest: Manifest) -> Options:
    try:
        return Options.from_json(manifest.options)
    except (TypeError, ValueError) as error:
        raise PrepError(
            f"the manifest's options are not those of this version ({error}). Verify with the version "
            f"that wrote the output, {manifest.tool_version}.",
            code="other-version",
        ) from None


def _chosen(manifest: Manifest) -> dict[str, Any]:
    default = Options().to_json()
    return {name: value for name, value in manifest.options.items() if value != default.get(name)}


def _check_segments(
    opened: OpenOutput,
    manifest: Manifest,
    plan: Plan | None,
    findings: Findings,
    engine: Engine,
    chunk_size: int,
    progress: ProgressCallback | None,
) -> int:
    files = dict(_file_checks(opened, manifest, plan))
    halved = (record.tensor(name) for name, record in manifest.weights.items() if record.element == "e4m3")
    laid_out = {
        stored: LaidOut(one.name, BandedWeight(one.layout.shape, one.content))
        for stored, one in manifest.laid_out.items()
    }
    work = CheckSegment(files, frozenset({*halved, *manifest.unscaled}), laid_out)
    meter = Meter(progress, "verify", sum(file.state.size for file in files.values()))
    nan_codes: Counter[str] = Counter()
    total = Tally()
    count = sum(len(file.digests) for file in files.values())
    items = [chain.from_iterable(file.segments(name) for name, file in files.items())]
    for found in engine.run(work, items, count, chunk_size):
        meter.add(found.nbytes)
        nan_codes.update(found.nan_codes)
        total.add(found.source)
        _add_segment(findings, found)
    for name in sorted({*nan_codes, *manifest.nan_tensors}):
        expected = manifest.nan_tensors.get(name, 0)
        if nan_codes[name] != expected:
            problem = f"expected {expected:,} NaN codes, found {nan_codes[name]:,}"
            findings.add(Difference(MANIFEST_NAME, problem, name))
    if plan is not None:
        for difference in compare_counts(manifest, total):
            findings.add(difference)
    return nan_codes.total()


def _add_segment(findings: Findings, found: SegmentFindings) -> None:
    for difference, count in found.differences:
        findings.add(difference, count)


def _file_checks(opened: OpenOutput, manifest: Manifest, plan: Plan | None) -> Iterator[tuple[str, FileChecks]]:
    planned: Mapping[str, OutputFile] = {file.name: file for file in plan.files} if plan is not None else {}
    for name, record in manifest.files.items():
        path = opened.folder / name
        if not is_readable(opened.folder, name) or (state := FileState.of(path)).size != record.size:
            continue
        expected = planned.get(name)
        if expected is not None and expected.size != record.size:
            expected = None
        yield name, FileChecks(path, state, record.digests, opened.shards.get(name), expected)

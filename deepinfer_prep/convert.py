"""Converts a checkpoint: carries out a plan and publishes the result. All decisions are in the plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_prep._version import __version__
from deepinfer_prep.engines.engine import Engine
from deepinfer_prep.engines.threads import Threads
from deepinfer_prep.errors import RefusedError, list_some
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.files.container import Location
from deepinfer_prep.files.storage import FileState, Place, Readable, absolute
from deepinfer_prep.inspect import Inspection, summarise
from deepinfer_prep.manifest import Counts, FileRecord, Manifest, WeightRecord
from deepinfer_prep.naming import SIDECAR_INDEX
from deepinfer_prep.options import Options
from deepinfer_prep.planning.plan import Plan, plan_conversion
from deepinfer_prep.remote.places import to_place
from deepinfer_prep.workers import DEFAULT_CHUNK_BYTES, Meter, ProgressCallback, default_workers
from deepinfer_prep.writing import sidecar
from deepinfer_prep.writing.open_target import open_target
from deepinfer_prep.writing.output_bytes import Tally
from deepinfer_prep.writing.preflight import ALL_FP8, check_values, explain_unscaled, scan_codes
from deepinfer_prep.writing.records import build_manifest
from deepinfer_prep.writing.segment_writer import Execution, check_unchanged
from deepinfer_prep.writing.target import Run, Target


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What a finished conversion did."""

    source: Place
    output: Place
    family: str
    files: int
    tensors: int
    output_bytes: int
    """All files of the output, the manifest excepted."""
    resumed_bytes: int
    """Bytes that an earlier, interrupted run had written and that were kept."""
    counts: Counts
    nan_tensors: Mapping[str, int]
    kernel_scales: Mapping[str, int]
    """Quantized weights by where their kernel scale is: "stored", "derived" or the reason why there is none."""
    no_kernel_scale: tuple[str, ...]
    """Those keys of `kernel_scales` that are reasons why there is none."""
    split: int
    """Matrices that were split into bf16 halves."""
    activation_scales: int
    """Static scales of e4m3 activations and of an fp8 KV cache, which the options doubled or kept."""
    laid_out: int
    """Weights that were put into the kernels' order."""
    warnings: tuple[str, ...]
    seconds: float


def convert_checkpoint(
    source: Place | str,
    output: Place | str,
    *,
    options: Options | None = None,
    workers: int | None = None,
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    overwrite: bool = False,
    follow_links: bool = False,
    engine: Engine | None = None,
    progress: ProgressCallback | None = None,
    warn: Callable[[str], None] | None = None,
) -> ConversionResult:
    """Convert a checkpoint (a folder, or one .safetensors file) into the folder `output`.

    Either may be a path or the URL of a store, s3://bucket/prefix.

    An interrupted conversion is resumed by calling this again with the same arguments; the result is the
    same, byte for byte. Memory is `workers` x `chunk_size` bytes of buffers, whatever the model's size.

    Args:
        options: choices that change the output; defaults to `Options()`.
        workers: threads; defaults to twice the processors of this process, at most 8, and to 12 with a store.
        chunk_size: bytes that a thread reads at once.
        overwrite: replace an output, or safetensors files, that `output` holds already.
        follow_links: also take files of the source that are links out of its folder.
        engine: what computes and writes the segments, such as `engines.ray_engine.connect`; defaults to `workers`
            threads.
        progress: called from this thread with the bytes done.
        warn: called with what is to be told of the values of scales, before anything is written; `warnings` of the
            result holds it as well.

    Raises:
        RefusedError: a safety rule stands against it; nothing was written.
        ContainerError, CheckpointError: the source is damaged; nothing was written.
        ConversionError, OSError: writing failed; call again to resume.
    """
    started = time.monotonic()
    source, output = to_place(source), to_place(output)
    if engine is not None and engine.is_remote:
        source, output = absolute(source), absolute(output)
    target = open_target(output)
    plan = _plan(source, target, options or Options(), overwrite, follow_links)
    workers = workers or default_workers(source, output)
    warnings = _check_contents(plan, workers, chunk_size, progress)
    if warn is not None:
        for warning in warnings:
            warn(warning)
    with target.hold(_identity(plan), plan.files, overwrite) as run:
        manifest, resumed = run.resume_publication(workers, chunk_size, progress), plan.output_bytes
        if manifest is None:
            manifest, resumed = _write_all(plan, run, engine or Threads(workers), chunk_size, progress)
        run.publish(manifest)
    return _result(plan, output, manifest, resumed, warnings + run.warnings, time.monotonic() - started)


def rehearse_conversion(
    source: Place | str,
    output: Place | str,
    *,
    options: Options | None = None,
    workers: int | None = None,
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    overwrite: bool = False,
    follow_links: bool = False,
    progress: ProgressCallback | None = None,
) -> Inspection:
    """Make every check that `convert_checkpoint` makes before it writes, and write nothing.

    Args: as those of `convert_checkpoint`.

    Returns:
        What would be done, with all that would be told of the values of scales.

    Raises:
        RefusedError, ContainerError, CheckpointError, ConversionError: as `convert_checkpoint` would.
    """
    source, target = to_place(source), open_target(to_place(output))
    plan = _plan(source, target, options or Options(), overwrite, follow_links)
    workers = workers or default_workers(source, target.place)
    return summarise(plan, workers, chunk_size, told=_check_contents(plan, workers, chunk_size, progress))


def discard_unfinished(output: Place | str) -> bool:
    """End an unfinished conversion into `output` and remove what it wrote; what is published there stays.

    Returns:
        Whether there was one.

    Raises:
        RefusedError: it is under way.
    """
    return open_target(to_place(output)).discard()


def _plan(source: Place, target: Target, options: Options, overwrite: bool, follow_links: bool) -> Plan:
    target.check_separate(source)
    plan = plan_conversion(open_checkpoint(source, follow_links), options)
    if plan.refusals:
        raise RefusedError(*(plan.refusals + explain_unscaled(plan)))
    target.check_sources(file.source for file in plan.files)
    target.check_usable(_identity(plan), _names(plan), overwrite)
    target.check_space(plan.output_bytes + plan.sidecar_bytes)
    return plan


def _check_contents(
    plan: Plan,
    workers: int,
    chunk_size: int,
    progress: ProgressCallback | None,
) -> tuple[str, ...]:
    """What is to be told of the data; data that stand in the way raise."""
    warnings = check_values(plan, workers, chunk_size, progress)
    if plan.options.strict:
        _refuse_nan(plan, scan_codes(plan, workers, chunk_size, progress, ALL_FP8))
    return warnings


def _names(plan: Plan) -> list[str]:
    return [file.name for file in plan.files]


def _identity(plan: Plan) -> dict[str, Any]:
    """What must be the same for an unfinished run to be resumed."""
    return {
        "tool": __version__,
        "source": plan.fingerprint,
        "files": [[file.name, *file.state.marks] for file in plan.files],
        "options": plan.options.to_json(),
    }


def _refuse_nan(plan: Plan, tally: Tally) -> None:
    if tally.nan_codes:
        listed = _listed(dict(sorted(tally.nan_codes.items())))
        raise RefusedError(
            f"{plan.checkpoint.root}: {tally.counts.nan:,} NaN codes in {len(tally.nan_codes):,} fp8 weights: "
            f"{listed}. "
            "The checkpoint is damaged; without --strict the codes are kept and counted.",
            code="nan-codes",
        )


def _listed(nan_tensors: Mapping[str, int]) -> str:
    return list_some(list(nan_tensors), 10, lambda name: f"{name!r} ({nan_tensors[name]:,})")


def _write_all(
    plan: Plan, run: Run, engine: Engine, chunk_size: int, progress: ProgressCallback | None
) -> tuple[Manifest, int]:
    execution = Execution(plan.files, run)
    execution.execute(engine, chunk_size, Meter(progress, "convert", plan.output_bytes))
    places = [run.written(file) for file in plan.files]
    contents = sidecar.choose_contents(plan, lambda name: _location(plan, places, name))
    names, records = _write_sidecar(run, contents)
    for file in plan.files:
        check_unchanged(file, FileState.now(file.source))
    manifest = build_manifest(plan, __version__, contents.weights, execution.results, names, records)
    return manifest, execution.resumed_bytes


def _location(plan: Plan, places: Sequence[Path | Readable], name: str) -> Location:
    number = plan.checkpoint.shard_of[name]
    return Location(places[number], len(plan.files[number].header), plan.checkpoint.tensors[name])


def _write_sidecar(run: Run, contents: sidecar.SidecarContents) -> tuple[list[str], dict[str, FileRecord]]:
    files = sidecar.lay_out(contents.tensors, __version__)
    records = {file.name: run.put_file(file.name, file.size, sidecar.file_chunks(file)) for file in files}
    if files:
        index = np.frombuffer(sidecar.index_json(files), dtype=np.uint8)
        records[SIDECAR_INDEX] = run.put_file(SIDECAR_INDEX, index.size, [index])
    return [file.name for file in files], records


def _result(
    plan: Plan, output: Place, manifest: Manifest, resumed: int, warnings: tuple[str, ...], seconds: float
) -> ConversionResult:
    return ConversionResult(
        source=plan.checkpoint.root,
        output=output,
        family=manifest.family,
        files=len(manifest.files),
        tensors=len(plan.checkpoint.tensors),
        output_bytes=sum(record.size for record in manifest.files.values()),
        resumed_bytes=resumed,
        counts=manifest.counts,
        nan_tensors=manifest.nan_tensors,
        kernel_scales=Counter(_kernel_scale_kind(record) for record in manifest.weights.values()),
        no_kernel_scale=tuple(
            sorted({record.reason for record in manifest.weights.values() if record.kernel_scale is None})
        ),
        split=len(manifest.split),
        activation_scales=len(manifest.activation_scales),
        laid_out=sum(record.layout is not None for record in manifest.weights.values()),
        warnings=plan.warnings + warnings + _data_warnings(manifest),
        seconds=seconds,
    )


def _kernel_scale_kind(record: WeightRecord) -> str:
    if record.kernel_scale is None:
        return record.reason
    return "stored" if record.kernel_scale == record.scale else "derived"


def _data_warnings(manifest: Manifest) -> tuple[str, ...]:
    warnings = []
    if manifest.nan_tensors:
        warnings.append(
            f"{manifest.counts.nan:,} NaN codes were kept, in {len(manifest.nan_tensors):,} tensors: "
            f"{_listed(manifest.nan_tensors)}."
        )
    halved = any(record.element == "e4m3" for record in manifest.weights.values())
    if halved and not manifest.counts.above_240:
        warnings.append(
            "no fp8 weight of the source holds a code above 240: it looks as if it had been converted already, by "
            "another tool. Make sure that this is the original checkpoint."
        )
    return tuple(warnings)

"""Reads a checkpoint or an output once and puts it into the figures of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from deepinfer_prep._version import __version__
from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.storage import Place
from deepinfer_prep.options import Options
from deepinfer_prep.quantized import FLOAT_DTYPES
from deepinfer_prep.remote.places import to_place
from deepinfer_prep.report.byte_counts import I64
from deepinfer_prep.report.codes import CodeFigures, halved_figures, halving_decibels, source_figures
from deepinfer_prep.report.counting import Counted, count_subject
from deepinfer_prep.report.figures import Distribution, KernelRow, OutputFacts, Report, TensorRow, Verification
from deepinfer_prep.report.layers import kind_and_layer
from deepinfer_prep.report.subject import DEPENDS, DERIVED, NONE, Kernel, Subject, Weight, read_subject
from deepinfer_prep.report.verdict import judge
from deepinfer_prep.report.verification import read_verification
from deepinfer_prep.workers import DEFAULT_CHUNK_BYTES, ProgressCallback, default_workers
from deepinfer_prep.writing.preflight import find_problems


def build_report(
    path: Place | str,
    *,
    options: Options | None = None,
    headers_only: bool = False,
    tensors: tuple[str, ...] = (),
    verification: Path | None = None,
    workers: int | None = None,
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    follow_links: bool = False,
    progress: ProgressCallback | None = None,
) -> Report:
    """Report on a checkpoint (what converting would do) or on a finished output (what was done).

    Memory is `workers` x (`chunk_size` + 3 MiB) of buffers, and what the report itself holds.

    Args:
        path: a folder, one .safetensors file, or an address of a store.
        options: the choices that `convert` would be given; of no effect for an output.
        headers_only: read no tensor data; figures of codes and scales are then None.
        tensors: name patterns (* stands for any characters) of tensors that are shown whatever their size.
        verification: the JSON report of `verify` on this output.
        workers: threads.
        chunk_size: bytes that a thread holds at a time.
        follow_links: also take files of a checkpoint that are links out of its folder.
        progress: told how many bytes are read.

    Raises:
        ManifestError, ContainerError, CheckpointError: `path` is damaged.
        PrepError: `verification` is not the report of a verification of this output.
        OSError: something cannot be read.
    """
    options = options or Options()
    workers = workers or default_workers()
    place = to_place(path)
    subject = read_subject(place, options, follow_links)
    verified = _read_verification(verification, subject)
    refusals = subject.differences
    if subject.plan is not None:
        refusals = subject.plan.refusals
        if not headers_only:
            refusals += find_problems(subject.plan, workers, chunk_size, progress)
    counted = count_subject(subject, options, headers_only, tensors, workers, chunk_size, progress)
    figures = source_figures if subject.manifest is None else halved_figures
    total = None if headers_only else figures(counted.total)
    kernels = {weight.name: _settle(weight, subject, counted) for weight in subject.weights}
    return Report(
        path=place,
        subject="checkpoint" if subject.manifest is None else "output",
        tool_version=__version__,
        family=subject.family,
        files=subject.files,
        bytes=subject.nbytes,
        codes_read=not headers_only,
        verdict=judge(subject, total, refusals, counted.bad_codes),
        sizes=subject.kinds,
        total=total,
        map=counted.map.build(figures),
        distributions=() if headers_only else tuple(_distributions(counted, figures)),
        kernels=_kernel_rows(subject, kernels),
        warnings=subject.warnings,
        refusals=tuple(refusals),
        tensors=tuple(_rows(subject, counted, kernels)),
        tensors_in_all=len(subject.tensors),
        rows_in_all=counted.candidates,
        output=_output_facts(subject, counted, headers_only, verified),
    )


def _read_verification(path: Path | None, subject: Subject) -> Verification | None:
    if path is None:
        return None
    if subject.manifest is None:
        raise PrepError(
            f"{subject.root} is no finished output, so {path} cannot be the report of its verification. "
            "Give the folder that was verified.",
            code="bad-verification",
        )
    return read_verification(path, subject.root)


def _output_facts(
    subject: Subject, counted: Counted, headers_only: bool, verified: Verification | None
) -> OutputFacts | None:
    manifest = subject.manifest
    if manifest is None:
        return None
    return OutputFacts(
        tool_version=manifest.tool_version,
        format_version=manifest.format_version,
        options=manifest.options,
        source_fingerprint=manifest.source_fingerprint,
        rounded=manifest.counts.rounded,
        nan=manifest.counts.nan,
        above_240=manifest.counts.above_240,
        halving_decibels=None if headers_only else halving_decibels(counted.total, manifest.counts.rounded),
        verification=verified,
    )


def _settle(weight: Weight, subject: Subject, counted: Counted) -> Kernel:
    """Whether a kernel scale can be derived, where the values that were read decide it."""
    kernel = weight.kernel
    if kernel.state != DEPENDS or weight.scale not in counted.all_powers:
        return kernel
    is_float = subject.tensors[weight.scale].tensor.dtype in FLOAT_DTYPES
    if is_float and not counted.all_powers[weight.scale]:
        return Kernel(NONE, "not every scale is a positive power of two")
    return Kernel(DERIVED) if is_float and kernel.conditions == 1 else kernel


def _kernel_rows(subject: Subject, kernels: Mapping[str, Kernel]) -> tuple[KernelRow, ...]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kernel in kernels.items():
        groups.setdefault((kernel.state, kernel.reason), []).append(name)

    def size(name: str) -> int:
        return subject.tensors[name].tensor.nbytes

    rows = (
        KernelRow(state, reason, len(names), sum(map(size, names)), max(names, key=size))
        for (state, reason), names in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _distributions(counted: Counted, figures: Callable[[I64], CodeFigures]) -> Iterator[Distribution]:
    if not counted.total.any() and not counted.distributions:
        return
    yield Distribution("all", "all fp8 weights", tuple(counted.total.tolist()), figures(counted.total))
    for kind, counts in counted.map.kinds().items():
        yield Distribution("kind", kind, tuple(counts.tolist()), figures(counts))
    for name in counted.listed:
        if name in counted.distributions:
            yield Distribution("tensor", name, tuple(counted.distributions[name].tolist()), counted.codes[name])


def _rows(subject: Subject, counted: Counted, kernels: Mapping[str, Kernel]) -> Iterator[TensorRow]:
    scale_of = {weight.name: weight.scale for weight in subject.weights}
    for name in counted.listed:
        tensor = subject.tensors[name].tensor
        kernel = kernels.get(name)
        yield TensorRow(
            name=name,
            kind=kind_and_layer(name)[0],
            role=subject.roles.get(name, "other"),
            dtype=tensor.dtype,
            shape=tensor.shape,
            bytes=tensor.nbytes,
            codes=counted.codes.get(name),
            scale=counted.scales.get(scale_of.get(name, "")),
            kernel=kernel.state if kernel is not None else "",
            kernel_reason=kernel.reason if kernel is not None else "",
        )

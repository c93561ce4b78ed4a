"""What a report is about: a checkpoint before its conversion or a finished output, seen in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from deepinfer_prep.checking.structure import OpenOutput, check_output
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.files.container import Location, TensorInfo
from deepinfer_prep.files.storage import Place
from deepinfer_prep.inspect import IN_KERNELS_ORDER, KindRow, summarise
from deepinfer_prep.kernel_scale import (
    KERNEL_COLUMNS,
    KERNEL_ROWS,
    Absent,
    Derived,
    PlannedWeight,
    Stored,
    describe,
    is_outside_kernels,
)
from deepinfer_prep.manifest import Manifest, WeightRecord, read_manifest
from deepinfer_prep.naming import MANIFEST_NAME
from deepinfer_prep.options import Options
from deepinfer_prep.planning.plan import Plan, plan_conversion
from deepinfer_prep.quantized import Element

STORED, DERIVED, DEPENDS, NONE = "stored", "derived", "depends on values", "none"
"""The states of a weight's kernel scale."""
_OUTSIDE = f"no kernel takes its shape (rows a multiple of {KERNEL_ROWS}, columns of {KERNEL_COLUMNS})"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Whether the kernels can take a weight: one of the four states, and the reason or the condition."""

    state: str
    reason: str = ""
    conditions: int = 0
    """How many conditions the values of the scale have to fulfil."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantized weight."""

    name: str
    scale: str
    element: Element
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint or an output as headers, and a manifest, describe it."""

    root: Place
    family: str
    files: int
    nbytes: int
    tensors: Mapping[str, Location]
    """The tensors of the shards; the sidecar's are only in `kinds`."""
    roles: Mapping[str, str]
    """What a tensor is, by name, where it is anything special."""
    weights: tuple[Weight, ...]
    unscaled: tuple[str, ...]
    kinds: tuple[KindRow, ...]
    warnings: tuple[str, ...]
    plan: Plan | None
    """Of a checkpoint."""
    manifest: Manifest | None
    """Of an output."""
    differences: tuple[str, ...]
    """Where an output is not what its manifest says, as far as headers tell."""


def read_subject(path: Place, options: Options, follow_links: bool = False) -> Subject:
    """Read the headers of a checkpoint, or those and the manifest of an output, whose links are never followed.

    Raises:
        ManifestError, ContainerError, CheckpointError: it is damaged.
        OSError: something cannot be read.
    """
    return _read_output(path) if (path / MANIFEST_NAME).is_file() else _read_checkpoint(path, options, follow_links)


def _read_checkpoint(path: Place, options: Options, follow_links: bool) -> Subject:
    plan = plan_conversion(open_checkpoint(path, follow_links), options)
    inspection = summarise(plan, workers=1, chunk_size=0)
    checkpoint = plan.checkpoint
    tensors = {name: checkpoint.location(name) for name in checkpoint.tensors}
    weights = tuple(
        Weight(
            weight.quantized.weight,
            weight.quantized.scale,
            weight.quantized.element,
            _planned_kernel(weight, checkpoint.tensors[weight.quantized.weight]),
        )
        for weight in plan.weights
    )
    return Subject(
        root=path,
        family=plan.family,
        files=len(plan.files),
        nbytes=inspection.source_bytes,
        tensors=tensors,
        roles=_roles(weights, plan.split, plan.activation_scales, plan.unscaled),
        weights=weights,
        unscaled=plan.unscaled,
        kinds=inspection.kinds,
        warnings=plan.warnings,
        plan=plan,
        manifest=None,
        differences=(),
    )


def _read_output(path: Place) -> Subject:
    manifest = read_manifest(path)
    output, differences = check_output(path, manifest)
    tensors = _under_own_names(output, manifest)
    weights = tuple(
        Weight(name, record.scale, record.element, _recorded_kernel(record, tensors[name].tensor))
        for name, record in manifest.weights.items()
        if name in tensors and record.scale in tensors
    )
    unscaled = tuple(name for name in manifest.unscaled if name in tensors)
    roles = _roles(weights, manifest.split, manifest.activation_scales, unscaled)
    return Subject(
        root=path,
        family=manifest.family,
        files=len(manifest.files) + 1,
        nbytes=sum(record.size for record in manifest.files.values()),
        tensors=tensors,
        roles=roles,
        weights=weights,
        unscaled=unscaled,
        kinds=tuple(_output_kinds(tensors, output.in_sidecar, manifest, roles)),
        warnings=(),
        plan=None,
        manifest=manifest,
        differences=tuple(map(str, differences)),
    )


def _under_own_names(output: OpenOutput, manifest: Manifest) -> dict[str, Location]:
    """The tensors of the shards, those in the kernels' order as the source names and declares them.

    Which codes a tensor holds is the same in either order; of such tensors no more than that is shown.
    """
    laid_out = manifest.laid_out
    tensors = {}
    for stored, location in output.main.items():
        if stored in laid_out:
            one = laid_out[stored]
            location = replace(location, tensor=location.tensor._replace(name=one.name, dtype=one.layout.dtype))
        tensors[location.tensor.name] = location
    return tensors


def _planned_kernel(weight: PlannedWeight, tensor: TensorInfo) -> Kernel:
    planned = weight.kernel_scale
    if isinstance(planned, Absent):
        return Kernel(NONE, planned.reason)
    if is_outside_kernels(tensor, weight.quantized.element):
        return Kernel(NONE, _OUTSIDE)
    if isinstance(planned, Derived) and planned.conditions:
        return Kernel(DEPENDS, describe(planned), len(planned.conditions))
    return Kernel(STORED if isinstance(planned, Stored) else DERIVED)


def _recorded_kernel(record: WeightRecord, tensor: TensorInfo) -> Kernel:
    if record.kernel_scale is None:
        return Kernel(NONE, record.reason)
    if is_outside_kernels(tensor, record.element):
        return Kernel(NONE, _OUTSIDE)
    return Kernel(STORED if record.kernel_scale == record.scale else DERIVED)


def _roles(
    weights: tuple[Weight, ...],
    split: Mapping[str, object] | tuple[str, ...],
    activation_scales: tuple[str, ...],
    unscaled: tuple[str, ...],
) -> dict[str, str]:
    roles = dict.fromkeys(split, "mixing matrix")
    roles |= dict.fromkeys(activation_scales, "activation scale")
    roles |= dict.fromkeys(unscaled, "fp8 without scale")
    for weight in weights:
        width = "fp8" if weight.element == "e4m3" else "fp4"
        roles[weight.name], roles[weight.scale] = f"{width} weight", f"{width} scale"
    return roles


_DONE = {
    "fp8 weight": "halved",
    "fp8 scale": "doubled",
    "mixing matrix": "copied; bf16 hi + lo in the sidecar",
}


def _output_kinds(
    tensors: Mapping[str, Location], in_sidecar: Mapping[str, Location], manifest: Manifest, roles: Mapping[str, str]
) -> Iterator[KindRow]:
    activation = "doubled" if manifest.options.get("activation_scales") == "double" else "copied"
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    done = {**_DONE, "activation scale": activation, "sidecar": "made"}
    laid_out = {one.name for one in manifest.laid_out.values()}
    located = [(roles.get(name, "other"), location.tensor) for name, location in tensors.items()]
    located += [("sidecar", location.tensor) for location in in_sidecar.values()]
    for role, tensor in located:
        action = done.get(role, "copied") + (IN_KERNELS_ORDER if tensor.name in laid_out else "")
        counts[role, tensor.dtype, action] += 1
        sizes[role, tensor.dtype, action] += tensor.nbytes
    for key in sorted(counts, key=lambda key: (key[0] == "other", -sizes[key])):
        role, dtype, action = key
        yield KindRow(role, dtype, "", counts[key], sizes[key], action)
    weights = {*manifest.shards, *manifest.sidecar}
    others = [record.size for name, record in manifest.files.items() if name not in weights]
    if others:
        yield KindRow("other files", "", "", len(others), sum(others), "copied")

"""Inspects a checkpoint from its headers: what it holds, what converting would change, what prevents it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deepinfer_prep.errors import Reason
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.files.storage import Place
from deepinfer_prep.kernel_scale import Absent, PlannedWeight, describe
from deepinfer_prep.options import Options
from deepinfer_prep.planning.plan import Plan, plan_conversion
from deepinfer_prep.remote.places import to_place
from deepinfer_prep.workers import DEFAULT_CHUNK_BYTES, ProgressCallback, default_workers
from deepinfer_prep.writing.preflight import find_problems, find_unsafe, scan_codes
from deepinfer_prep.writing.scale_values import ScaleJudge

IN_KERNELS_ORDER = ", in the kernels' order"
"""What is said, besides, of weights whose bytes are moved."""


@dataclass(frozen=True, slots=True)
class KindRow:
    """All tensors of one kind."""

    kind: str
    dtype: str
    scale: str
    """Scale dtype and block of a quantized weight, else empty."""
    tensors: int
    bytes: int
    action: str
    """What convert does with them."""


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What reading the fp8 tensors found; all but the last two fields are of the fp8 weights."""

    codes: int
    rounded: int
    nan: int
    above_240: int
    nan_tensors: Mapping[str, int]
    unscaled_bytes: int
    """Bytes of the fp8 tensors without a scale."""
    unsafe: Mapping[str, str]
    """Those of them that cannot be copied as they are: name -> the first code that forbids it."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of `inspect_checkpoint`."""

    root: Place
    family: str
    shards: int
    tensors: int
    source_bytes: int
    kinds: tuple[KindRow, ...]
    output_bytes: int
    sidecar_bytes: int
    """Upper bound: a kernel scale is left out where its values turn out to have no kernel form."""
    buffer_bytes: int
    """Memory that convert takes for data, whatever the model's size."""
    kernel_scales: Mapping[str, int]
    """Quantized weights by where their kernel scale is or may come from, or the reason why there is none."""
    no_kernel_scale: tuple[str, ...]
    """Those keys of `kernel_scales` that are reasons why there is none."""
    split: tuple[str, ...]
    activation_scales: tuple[str, ...]
    laid_out: tuple[str, ...]
    """Weights that are put into the kernels' order."""
    unscaled: tuple[str, ...]
    """F8_E4M3 tensors without a scale."""
    scan: ScanResult | None
    warnings: tuple[str, ...]
    refusals: tuple[Reason, ...]
    refusal_codes: tuple[str, ...]
    """The code of each refusal, in their order."""


def inspect_checkpoint(
    source: Place | str,
    *,
    options: Options | None = None,
    scan: bool = False,
    workers: int | None = None,
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    follow_links: bool = False,
    progress: ProgressCallback | None = None,
) -> Inspection:
    """Inspect a checkpoint (a folder, or one .safetensors file); with `scan`, read its fp8 tensors and scales as well.

    What would make `convert_checkpoint` refuse is listed in `refusals`.

    Raises:
        ContainerError, CheckpointError: the checkpoint is damaged.
        OSError: something cannot be read.
    """
    workers = workers or default_workers()
    plan = plan_conversion(open_checkpoint(to_place(source), follow_links), options or Options())
    if not scan:
        return summarise(plan, workers, chunk_size)
    scanned = _scan(plan, workers, chunk_size, progress)
    judge = ScaleJudge(plan)
    problems = find_problems(plan, workers, chunk_size, progress, judge)
    return summarise(plan, workers, chunk_size, scanned, problems, judge.warnings)


def summarise(
    plan: Plan,
    workers: int,
    chunk_size: int,
    scanned: ScanResult | None = None,
    problems: tuple[Reason, ...] = (),
    told: tuple[str, ...] = (),
) -> Inspection:
    """Put a plan into figures, with what a scan found, the values that stand in the way, and those to be told of."""
    refusals = plan.refusals + problems
    return Inspection(
        root=plan.checkpoint.root,
        family=plan.family,
        shards=len(plan.checkpoint.shards),
        tensors=len(plan.checkpoint.tensors),
        source_bytes=sum(file.state.size for file in plan.files),
        kinds=tuple(_kinds(plan)),
        output_bytes=plan.output_bytes,
        sidecar_bytes=plan.sidecar_bytes,
        buffer_bytes=workers * (chunk_size + 2 * plan.band_bytes),
        kernel_scales=Counter(describe(weight.kernel_scale) for weight in plan.weights),
        no_kernel_scale=tuple(
            sorted({weight.kernel_scale.reason for weight in plan.weights if isinstance(weight.kernel_scale, Absent)})
        ),
        split=plan.split,
        activation_scales=plan.activation_scales,
        laid_out=plan.laid_out_weights,
        unscaled=plan.unscaled,
        scan=scanned,
        warnings=plan.warnings + told,
        refusals=refusals,
        refusal_codes=tuple(reason.code for reason in refusals),
    )


def _scan(plan: Plan, workers: int, chunk_size: int, progress: ProgressCallback | None) -> ScanResult:
    tally = scan_codes(plan, workers, chunk_size, progress)
    weights = (weight.quantized for weight in plan.weights)
    codes = sum(plan.checkpoint.tensors[weight.weight].elements for weight in weights if weight.element == "e4m3")
    counts = tally.counts
    return ScanResult(
        codes=codes,
        rounded=counts.rounded,
        nan=counts.nan,
        above_240=counts.above_240,
        nan_tensors=dict(sorted(tally.nan_codes.items())),
        unscaled_bytes=sum(plan.checkpoint.tensors[name].nbytes for name in plan.unscaled),
        unsafe=find_unsafe(plan, workers, chunk_size, progress),
    )


def _kinds(plan: Plan) -> Iterator[KindRow]:
    described = {**_weight_kinds(plan), **_named_kinds(plan)}
    counts: Counter[tuple[str, str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str, str]] = Counter()
    for tensor in plan.checkpoint.tensors.values():
        kind, scale, action = described.get(tensor.name, ("other", "", "copied"))
        key = (kind, tensor.dtype, scale, action)
        counts[key] += 1
        sizes[key] += tensor.nbytes
    for key in sorted(counts, key=lambda key: (key[0] == "other", -sizes[key])):
        kind, dtype, scale, action = key
        yield KindRow(kind, dtype, scale, counts[key], sizes[key], action)
    if plan.checkpoint.others:
        size = sum(other.state.size for other in plan.checkpoint.others)
        yield KindRow("other files", "", "", len(plan.checkpoint.others), size, "copied")


def _weight_kinds(plan: Plan) -> dict[str, tuple[str, str, str]]:
    """Tensor name -> (kind, scale, action) for quantized weights and their scales."""
    kinds = {}
    for weight in plan.weights:
        quantized = weight.quantized
        scale = plan.checkpoint.tensors[quantized.scale].dtype
        block = "x".join(map(str, quantized.block)) if quantized.block else "block not known"
        order = IN_KERNELS_ORDER if quantized.weight in plan.laid_out else ""
        if quantized.element == "e4m3":
            action = f"halved{order}"
            kinds[quantized.weight] = ("fp8 weight", f"{scale} {_named_block(plan, weight) or block}", action)
            kinds[quantized.scale] = ("fp8 scale", "", "doubled")
        else:
            kinds[quantized.weight] = ("fp4 weight", f"{scale} {block}", f"copied{order}")
            order = IN_KERNELS_ORDER if quantized.scale in plan.laid_out else ""
            kinds[quantized.scale] = ("fp4 scale", "", f"copied{order}")
    return kinds


def _named_block(plan: Plan, weight: PlannedWeight) -> str:
    """ "per tensor" and "per row" for blocks that differ from weight to weight."""
    shape, block = plan.checkpoint.tensors[weight.quantized.weight].shape, weight.quantized.block
    if block is None or len(shape) < 2:
        return ""
    if block == shape[-2:] and plan.checkpoint.tensors[weight.quantized.scale].elements == 1:
        return "per tensor"
    return "per row" if block == (1, shape[-1]) else ""


def _named_kinds(plan: Plan) -> dict[str, tuple[str, str, str]]:
    kinds = dict.fromkeys(plan.split, ("mixing matrix", "", "copied; bf16 hi + lo in the sidecar"))
    activation = "doubled" if plan.options.activation_scales == "double" else "kept"
    kinds |= dict.fromkeys(plan.activation_scales, ("activation scale", "", activation))
    unscaled = "copied if no code lies above 240" if plan.options.unscaled == "copy-if-safe" else "refused"
    kinds |= dict.fromkeys(plan.unscaled, ("fp8 without scale", "", unscaled))
    return kinds

"""Plans a conversion: the header and byte runs of every output file, the sidecar, warnings and refusals.

Halving and doubling keep every tensor's size, so a shard's data section maps byte for byte onto its output:
a plan is a sorted list of runs, and only headers change. Nothing here reads tensor data.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from deepinfer_prep import fp8
from deepinfer_prep._version import __version__
from deepinfer_prep.errors import Reason
from deepinfer_prep.families import Layout, read_layout
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.checkpoint import Checkpoint, Shard
from deepinfer_prep.files.container import MAX_HEADER_BYTES, PREFIX_BYTES, TensorInfo, encode_header
from deepinfer_prep.files.source_files import OtherFile
from deepinfer_prep.files.storage import FileState, Place
from deepinfer_prep.kernel_scale import Derived, PlannedWeight, plan_weight
from deepinfer_prep.naming import MARKER, MAX_MARKER
from deepinfer_prep.options import Options
from deepinfer_prep.planning.laid_out import choose_laid_out, new_index, output_tensors
from deepinfer_prep.planning.refusals import find_refusals
from deepinfer_prep.planning.split import choose_split
from deepinfer_prep.planning.warnings import find_warnings
from deepinfer_prep.quantized import element_bytes


class Operation(enum.Enum):
    """What happens to the bytes of a run; every operation keeps their number."""

    COPY = "copy"
    COPY_CHECKED = "copy checked"
    """Copy e4m3fn codes that have no scale; one that the hardware reads differently stops the run."""
    HALVE = "halve"
    """Replace each e4m3fn code by the code of half its value."""
    DOUBLE = "double"
    """Replace each value of a scale by twice the value."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes start..end of a data section that take one operation; `dtype` is that of a scale to double.

    With `banded` they are one tensor that is also put into the kernels' order.
    """

    start: int
    end: int
    operation: Operation
    dtype: str = ""
    banded: BandedWeight | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return element_bytes(self.dtype) if self.operation is Operation.DOUBLE else 1

    def unit_at(self, offset: int) -> tuple[int, int]:
        """Start and end of the bytes that must be worked on together with the one at `offset`: an element or a band."""
        if self.banded is None:
            low = offset - (offset - self.start) % self.element_bytes
            return low, low + self.element_bytes
        start, band = self.banded.band_at(offset - self.start)
        return self.start + start, self.start + start + band.rows * self.banded.row_bytes


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file of the output that is mapped from one file of the source.

    The output is `header`, then `data_size` bytes that stand at `source_start` in the source. A copied file
    has an empty header and a single run; of an index that is written anew all is header.
    """

    name: str
    source: Place
    state: FileState
    header: bytes
    source_start: int
    data_size: int
    runs: tuple[Run, ...]
    tensors: tuple[TensorInfo, ...]
    """As the source names them."""

    @property
    def size(self) -> int:
        """Bytes of the output file."""
        return len(self.header) + self.data_size


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a conversion does, decided before the first byte of data is read."""

    checkpoint: Checkpoint
    family: str
    options: Options
    files: tuple[OutputFile, ...]
    weights: tuple[PlannedWeight, ...]
    split: tuple[str, ...]
    activation_scales: tuple[str, ...]
    zero_points: tuple[str, ...]
    """Tensors that have to be all zero."""
    unscaled: tuple[str, ...]
    """F8_E4M3 tensors without a scale; copied if the options allow it and their codes do."""
    operations: Mapping[str, Operation] = field(repr=False)
    """Operation of every tensor that is not copied, by name."""
    laid_out: Mapping[str, BandedWeight] = field(repr=False)
    """The weights, and scales of weights, whose bytes are put into the kernels' order."""
    warnings: tuple[str, ...]
    refusals: tuple[Reason, ...]
    fingerprint: str
    """xxh3-128 over the names, sizes and headers of the source's files."""

    @property
    def laid_out_weights(self) -> tuple[str, ...]:
        """The weights among `laid_out`."""
        weights = (weight.quantized.weight for weight in self.weights)
        return tuple(name for name in weights if name in self.laid_out)

    @property
    def output_bytes(self) -> int:
        """Bytes of all mapped files; the sidecar comes on top."""
        return sum(file.size for file in self.files)

    @property
    def band_bytes(self) -> int:
        """Bytes of the largest band of a weight that is put into the kernels' order, of which a worker holds two."""
        return max((weight.largest_band_bytes for weight in self.laid_out.values()), default=0)

    @property
    def sidecar_bytes(self) -> int:
        """Upper bound of the sidecar's tensor bytes; scales whose values have no kernel form are left out."""
        halves = sum(self.checkpoint.tensors[name].nbytes for name in self.split)
        scales = (weight.kernel_scale for weight in self.weights)
        return halves + sum(scale.nbytes for scale in scales if isinstance(scale, Derived))


def plan_conversion(checkpoint: Checkpoint, options: Options, tool_version: str = __version__) -> Plan:
    """Plan a conversion from headers alone.

    The plan lists its refusals instead of raising, so that all of them can be shown at once.
    """
    layout = read_layout(checkpoint, options.maps, options.blocks)
    split = choose_split(checkpoint, options.split)
    operations = _operations(checkpoint, layout, options)
    metadata = {MARKER: tool_version, MAX_MARKER: str(fp8.FP8_MAX)}
    weights = tuple(plan_weight(checkpoint, quantized) for quantized in layout.weights)
    laid_out = choose_laid_out(checkpoint, weights) if options.layout == "kernel" else {}
    files = [_plan_shard(shard, operations, laid_out, metadata) for shard in checkpoint.shards]
    files += [_plan_other(other, laid_out) for other in checkpoint.others]
    warnings = find_warnings(checkpoint, layout, weights, options)
    return Plan(
        checkpoint=checkpoint,
        family=layout.family,
        options=options,
        files=tuple(files),
        weights=weights,
        split=split.names,
        activation_scales=layout.activation_scales,
        zero_points=layout.zero_points,
        unscaled=tuple(layout.unpaired),
        operations=operations,
        laid_out=laid_out,
        warnings=checkpoint.warnings + layout.warnings + split.warnings + warnings,
        refusals=(
            *find_refusals(checkpoint, layout, options, split.names, laid_out),
            *split.refusals,
            *_unreadable_headers(files),
        ),
        fingerprint=_fingerprint(checkpoint),
    )


def _unreadable_headers(files: Iterable[OutputFile]) -> Iterator[Reason]:
    """Headers that this tool's marks make longer than any reader accepts."""
    for file in files:
        if len(file.header) - PREFIX_BYTES > MAX_HEADER_BYTES:
            yield Reason(
                f"{file.source}: its header would grow to {len(file.header) - PREFIX_BYTES:,} bytes by the marks of a "
                f"converted file, above the format's limit of {MAX_HEADER_BYTES:,}. Split the file into two shards.",
                "header-too-large",
            )


def _operations(checkpoint: Checkpoint, layout: Layout, options: Options) -> dict[str, Operation]:
    operations = dict.fromkeys(layout.unpaired, Operation.COPY_CHECKED)
    for quantized in layout.weights:
        if quantized.element == "e4m3":
            operations[quantized.weight] = Operation.HALVE
            operations[quantized.scale] = Operation.DOUBLE
    if options.activation_scales == "double":
        operations |= dict.fromkeys(layout.activation_scales, Operation.DOUBLE)
    return operations


def _plan_shard(
    shard: Shard, operations: Mapping[str, Operation], laid_out: Mapping[str, BandedWeight], metadata: Mapping[str, str]
) -> OutputFile:
    tensors = output_tensors(shard.header.tensors, laid_out)
    header = encode_header(tensors, {"format": "pt", **shard.header.metadata, **metadata})
    return OutputFile(
        name=shard.name,
        source=shard.path,
        state=shard.state,
        header=header,
        source_start=shard.header.data_start,
        data_size=shard.header.data_size,
        runs=tuple(_runs(shard.header.tensors, operations, laid_out)),
        tensors=shard.header.tensors,
    )


def _runs(
    tensors: Iterable[TensorInfo], operations: Mapping[str, Operation], laid_out: Mapping[str, BandedWeight]
) -> Iterator[Run]:
    """The runs of a data section: neighbours with the same operation, on the same dtype, become one.

    A weight that is put into another order is a run of its own.
    """
    start, end = 0, 0
    current: tuple[Operation, str, BandedWeight | None] = (Operation.COPY, "", None)
    for tensor in tensors:
        operation, banded = operations.get(tensor.name, Operation.COPY), laid_out.get(tensor.name)
        wanted = (operation, tensor.dtype if operation is Operation.DOUBLE else "", banded)
        if wanted != current or banded is not None:
            if end > start:
                yield Run(start, end, *current)
            start, current = tensor.start, wanted
        end = tensor.end
    if end > start:
        yield Run(start, end, *current)


def _plan_other(other: OtherFile, laid_out: Mapping[str, BandedWeight]) -> OutputFile:
    index = new_index(other, laid_out)
    if index:
        return OutputFile(other.name, other.path, other.state, index, 0, 0, (), ())
    size = other.state.size
    runs = (Run(0, size, Operation.COPY),) if size else ()
    return OutputFile(other.name, other.path, other.state, b"", 0, size, runs, ())


def _fingerprint(checkpoint: Checkpoint) -> str:
    digest = xxhash.xxh3_128()
    for shard in checkpoint.shards:
        digest.update(f"{shard.name}\0{shard.state.size}\0{shard.header.digest}\0".encode())
    for other in checkpoint.others:
        digest.update(f"{other.name}\0{other.state.size}\0".encode())
    return digest.hexdigest()

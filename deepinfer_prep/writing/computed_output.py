"""The output of a conversion, computed when it is read instead of written: for loading an unprepared checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer_prep._version import __version__
from deepinfer_prep.errors import RefusedError
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.files.container import PREFIX_BYTES, Header, Location, parse_header
from deepinfer_prep.files.storage import Place, Readable
from deepinfer_prep.manifest import FileRecord, Manifest
from deepinfer_prep.options import Options
from deepinfer_prep.planning.plan import plan_conversion
from deepinfer_prep.workers import DEFAULT_CHUNK_BYTES, default_workers
from deepinfer_prep.writing.computed_bytes import ComputedBytes, ComputedSidecar
from deepinfer_prep.writing.output_bytes import Tally
from deepinfer_prep.writing.preflight import check_values
from deepinfer_prep.writing.records import describe
from deepinfer_prep.writing.sidecar import choose_contents, lay_out


@dataclass(frozen=True, slots=True)
class ComputedOutput:
    """What a conversion would write: the manifest, and the safetensors files by their names in the output."""

    manifest: Manifest
    """Without digests and counts, which only reading everything gives."""
    headers: Mapping[str, Header]
    places: Mapping[str, Readable]


def compute_output(source: Place, *, options: Options | None = None) -> ComputedOutput:
    """Plan the conversion of a checkpoint whose output is read and never written; only headers and scales are read.

    Raises:
        RefusedError: a conversion would be refused.
        ContainerError, CheckpointError: the source is damaged.
    """
    plan = plan_conversion(open_checkpoint(source), options or Options())
    if plan.refusals:
        raise RefusedError(*plan.refusals)
    check_values(plan, default_workers(), DEFAULT_CHUNK_BYTES)
    shards = plan.files[: len(plan.checkpoint.shards)]
    places: dict[str, Readable] = {file.name: ComputedBytes(file) for file in shards}
    headers = {file.name: file.header for file in shards}
    sizes = {file.name: file.size for file in shards}

    def locate(name: str) -> Location:
        file = shards[plan.checkpoint.shard_of[name]]
        return Location(places[file.name], len(file.header), plan.checkpoint.tensors[name])

    contents = choose_contents(plan, locate)
    sidecar = lay_out(contents.tensors, __version__)
    for extra in sidecar:
        places[extra.name], headers[extra.name], sizes[extra.name] = ComputedSidecar(extra), extra.header, extra.size
    files = {name: FileRecord(size, ()) for name, size in sizes.items()}
    manifest = describe(plan, __version__, contents.weights, Tally(), [file.name for file in sidecar], files)
    parsed = {name: parse_header(text[PREFIX_BYTES:], sizes[name], name) for name, text in headers.items()}
    return ComputedOutput(manifest, parsed, places)

"""Checks a finished output without reading tensor data: its files, sizes, headers, indexes and manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_prep.checking.findings import Difference
from deepinfer_prep.errors import CheckpointError, ContainerError
from deepinfer_prep.files.checkpoint import Shard, check_index, read_index, read_shard
from deepinfer_prep.files.container import Location
from deepinfer_prep.files.storage import FileState, Place
from deepinfer_prep.files.untrusted import leads_out
from deepinfer_prep.manifest import LayoutRecord, Manifest
from deepinfer_prep.naming import INDEX_SUFFIX, MANIFEST_NAME, MARKER, SHARD_SUFFIX, SIDECAR_FOLDER, SIDECAR_INDEX
from deepinfer_prep.quantized import Element

_WEIGHT_DTYPES: Mapping[Element, tuple[str, ...]] = {"e4m3": ("F8_E4M3",), "e2m1": ("I8", "U8")}


@dataclass(frozen=True, slots=True)
class OpenOutput:
    """The parts of an output that could be opened, by file name, and where each tensor lies."""

    folder: Place
    shards: Mapping[str, Shard]
    sidecar: Mapping[str, Shard]
    main: Mapping[str, Location]
    """Tensors of the main shards."""
    in_sidecar: Mapping[str, Location]
    """Tensors of the sidecar."""


def check_output(folder: Place, manifest: Manifest) -> tuple[OpenOutput, list[Difference]]:
    """Open every file that the manifest names and compare what headers and indexes say."""
    differences = [*_check_files(folder, manifest), *_check_foreign(folder, manifest)]
    shards = _open(folder, manifest.shards, differences)
    sidecar = _open(folder, manifest.sidecar, differences)
    main, in_sidecar = _locations(shards, differences), _locations(sidecar, differences)
    output = OpenOutput(folder, shards, sidecar, main, in_sidecar)
    differences += _check_indexes(output, manifest)
    differences += _check_names(output, manifest)
    return output, differences


def _check_files(folder: Place, manifest: Manifest) -> Iterator[Difference]:
    for name, record in manifest.files.items():
        path = folder / name
        if isinstance(folder, Path) and isinstance(path, Path) and leads_out(folder, path):
            yield Difference(name, "is a link that leads out of the folder; it is not followed")
        elif not path.is_file():
            yield Difference(name, "the manifest names this file, but it is missing")
        elif FileState.of(path).size != record.size:
            yield Difference(name, f"expected {record.size:,} bytes, found {FileState.of(path).size:,}")


def is_readable(folder: Place, name: str) -> bool:
    """Whether a file that the manifest names is there and is not a link that leads out of the folder."""
    path = folder / name
    if isinstance(folder, Path) and isinstance(path, Path) and leads_out(folder, path):
        return False
    return path.is_file()


def _check_foreign(folder: Place, manifest: Manifest) -> Iterator[Difference]:
    inside = folder / SIDECAR_FOLDER
    names = [entry.name for entry in folder.iterdir()]
    names += [f"{SIDECAR_FOLDER}/{entry.name}" for entry in (inside.iterdir() if inside.is_dir() else ())]
    for name in sorted(names):
        if name.endswith((SHARD_SUFFIX, INDEX_SUFFIX)) and name not in manifest.files:
            yield Difference(name, "the manifest does not name this file, but a loader may read it")


def _open(folder: Place, names: tuple[str, ...], differences: list[Difference]) -> dict[str, Shard]:
    opened = {}
    for name in names:
        if not is_readable(folder, name):
            continue
        try:
            opened[name] = read_shard(folder / name)
        except ContainerError as error:
            differences.append(Difference(name, str(error)))
        else:
            if MARKER not in opened[name].header.metadata:
                differences.append(
                    Difference(name, f"the header's metadata has no {MARKER!r}: not written by this tool")
                )
    return opened


def _locations(shards: Mapping[str, Shard], differences: list[Difference]) -> dict[str, Location]:
    locations: dict[str, Location] = {}
    for shard in shards.values():
        for tensor in shard.header.tensors:
            if tensor.name in locations:
                differences.append(Difference(shard.name, "another file holds a tensor of this name", tensor.name))
            locations[tensor.name] = Location(shard.path, shard.header.data_start, tensor)
    return locations


def _check_indexes(output: OpenOutput, manifest: Manifest) -> Iterator[Difference]:
    for name in manifest.files:
        is_copied_along = "/" in name and name != SIDECAR_INDEX
        if is_copied_along or not name.endswith(INDEX_SUFFIX) or not is_readable(output.folder, name):
            continue
        shards = output.sidecar if name == SIDECAR_INDEX else output.shards
        try:
            weight_map = read_index(output.folder / name)
            if name == SIDECAR_INDEX or set(weight_map.values()) <= set(manifest.shards):
                check_index(output.folder / name, weight_map, shards.values())
        except CheckpointError as error:
            yield Difference(name, str(error))


def _check_names(output: OpenOutput, manifest: Manifest) -> Iterator[Difference]:
    """Every tensor that the manifest names has to be there with a fitting dtype."""
    for weight, record in manifest.weights.items():
        if record.layout is None:
            yield from _check_dtype(output.main, weight, _WEIGHT_DTYPES[record.element])
        else:
            yield from _check_laid_out(output.main, weight, record.tensor(weight), record.layout)
        if record.scale_layout is None:
            yield from _check_present(output.main, record.scale)
        else:
            yield from _check_laid_out(output.main, record.scale, record.scale_tensor, record.scale_layout)
        if record.kernel_scale is not None and record.kernel_scale != record.scale:
            yield from _check_present(output.in_sidecar, record.kernel_scale)
    for name in manifest.unscaled:
        yield from _check_dtype(output.main, name, _WEIGHT_DTYPES["e4m3"])
    for name, split in manifest.split.items():
        yield from _check_dtype(output.main, name, ("F32",))
        yield from _check_dtype(output.in_sidecar, split.hi, ("BF16",))
        yield from _check_dtype(output.in_sidecar, split.lo, ("BF16",))


def _check_laid_out(
    tensors: Mapping[str, Location], name: str, stored: str, layout: LayoutRecord
) -> Iterator[Difference]:
    yield from _check_dtype(tensors, stored, ("U8",))
    if name in tensors:
        problem = f"{stored!r} holds it in the kernels' order; under its own name a loader takes bytes for row-major"
        yield Difference(tensors[name].path.name, problem, name)
    if stored in tensors and tensors[stored].tensor.shape != layout.shape:
        problem = f"expected the shape {list(layout.shape)}, found {list(tensors[stored].tensor.shape)}"
        yield Difference(tensors[stored].path.name, problem, stored)


def _check_present(tensors: Mapping[str, Location], name: str) -> Iterator[Difference]:
    if name not in tensors:
        yield Difference(MANIFEST_NAME, "the manifest names this tensor, but no file holds it", name)


def _check_dtype(tensors: Mapping[str, Location], name: str, allowed: tuple[str, ...]) -> Iterator[Difference]:
    yield from _check_present(tensors, name)
    if name in tensors and tensors[name].tensor.dtype not in allowed:
        problem = f"expected dtype {' or '.join(allowed)}, found {tensors[name].tensor.dtype}"
        yield Difference(tensors[name].path.name, problem, name)

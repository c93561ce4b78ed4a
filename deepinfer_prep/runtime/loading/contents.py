"""What lies in a finished output, by its manifest and its headers, checked against one another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from deepinfer_prep.errors import ManifestError
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.container import Header, TensorInfo, read_header
from deepinfer_prep.files.storage import FileState, Place, Readable
from deepinfer_prep.files.untrusted import leads_out
from deepinfer_prep.manifest import Manifest, read_manifest
from deepinfer_prep.naming import MANIFEST_NAME, MARKER, WORKSPACE_NAME
from deepinfer_prep.runtime.dtypes import TORCH_DTYPES, torch_shape
from deepinfer_prep.runtime.loading.banded_layout import BandedLayout
from deepinfer_prep.runtime.loading.byte_layout import FileLayout
from deepinfer_prep.runtime.loading.consistency import contradictions, is_grid, scale_grid

_READ_AT_ONCE = 16
_VERIFY = "`deepinfer-prep verify` tells what is wrong with the folder; if it was changed, convert again."


class ComputedOutput(Protocol):
    """An output that is computed while it is read; `deepinfer_prep.compute_output` returns one."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def headers(self) -> Mapping[str, Header]: ...

    @property
    def places(self) -> Mapping[str, Readable]: ...


class StoredTensor(NamedTuple):
    """One tensor of the checkpoint: its torch dtype and shape, and where its bytes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    start: int
    """Offset of its first byte in the file."""
    banded: BandedWeight | None = None
    """Of a tensor that is stored in the kernels' order."""
    is_restored: bool = False
    """Whether it is read row-major all the same: the tensor itself, and not the bytes that are stored for it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def layout(self) -> FileLayout | BandedLayout:
        """Its bytes in the file."""
        if self.banded is not None:
            return BandedLayout(self.start, self.banded)
        return FileLayout(self.start, self.shape, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Contents:
    """A finished output's manifest, and every tensor of its shards and its sidecar, in the order of the files.

    One in the kernels' order is there twice: as it is, under its own name, and as it is stored.
    """

    manifest: Manifest
    tensors: Mapping[str, StoredTensor]
    grids: Mapping[str, tuple[int, ...]]
    """The scales stored with axes of 1 beyond those of their grid: [rows, 1, columns, 1] -> [rows, columns]."""


def read_contents(folder: Place) -> Contents:
    """Read the manifest and all headers.

    Raises:
        ManifestError: the folder is no finished output, one of another format, or its files or their tensors are not
            those that the manifest describes.
        ContainerError: a file is damaged.
    """
    _refuse_unfinished(folder)
    manifest = read_manifest(folder)
    tensors: dict[str, StoredTensor] = {}
    names = (*manifest.shards, *manifest.sidecar)
    for name, header in zip(names, _read_headers(folder, names, manifest), strict=True):
        tensors.update((info.name, _stored(folder, name, header, info)) for info in header.tensors)
    _check_names(folder, manifest, tensors)
    return _checked(folder, manifest, dict(_with_restored(folder, manifest, tensors)))


def computed_contents(folder: Place, output: ComputedOutput) -> Contents:
    """What an output would hold that is computed while it is read.

    Raises:
        ManifestError: torch lacks a dtype of its tensors.
    """
    tensors: dict[str, StoredTensor] = {}
    for name, header in output.headers.items():
        tensors.update((info.name, _stored(folder, name, header, info)) for info in header.tensors)
    return _checked(folder, output.manifest, tensors)


def _checked(folder: Place, manifest: Manifest, tensors: Mapping[str, StoredTensor]) -> Contents:
    problems = contradictions(manifest, tensors)
    if problems:
        raise ManifestError(
            f"{folder / MANIFEST_NAME} and the headers of its files contradict one another: {problems}. {_VERIFY}"
        )
    return Contents(manifest, tensors, dict(_grids(manifest, tensors)))


def _refuse_unfinished(folder: Place) -> None:
    if not folder.is_dir():
        raise ManifestError(f"{folder} is no folder. Give the output folder of `deepinfer-prep convert`.")
    if (folder / WORKSPACE_NAME).exists() and not (folder / MANIFEST_NAME).exists():
        raise ManifestError(
            f"{folder} holds an unfinished conversion ({WORKSPACE_NAME} is there, {MANIFEST_NAME} is not). "
            "Run the same `deepinfer-prep convert` again: it resumes."
        )
    if not (folder / MANIFEST_NAME).exists():
        raise ManifestError(
            f"{folder} has no {MANIFEST_NAME}: it is not a finished output. Convert the checkpoint with "
            "`deepinfer-prep convert`, or give repair=True to halve and double while loading.",
            code="no-output",
        )


def _read_headers(folder: Place, names: Sequence[str], manifest: Manifest) -> list[Header]:
    if isinstance(folder, Path):
        return [_read_header(folder, name, manifest) for name in names]
    with ThreadPoolExecutor(_READ_AT_ONCE) as executor:  # Each waits for answers of a store.
        return list(executor.map(lambda name: _read_header(folder, name, manifest), names))


def _read_header(folder: Place, name: str, manifest: Manifest) -> Header:
    path, record = folder / name, manifest.files.get(name)
    if isinstance(folder, Path) and isinstance(path, Path) and leads_out(folder, path):
        raise ManifestError(
            f"{path} is a link that leads out of the folder, and is not followed. Put the file itself there."
        )
    if not path.exists():
        raise ManifestError(f"{path} is missing, but {MANIFEST_NAME} names it. {_VERIFY}")
    found = FileState.of(path).size
    if record is None or record.size != found:
        expected = "no such file" if record is None else f"{record.size:,} bytes"
        raise ManifestError(f"{path} has {found:,} bytes, but {MANIFEST_NAME} says {expected}. {_VERIFY}")
    header = read_header(path)
    if MARKER not in header.metadata:
        raise ManifestError(
            f"{path} does not carry the mark of a converted file, though {MANIFEST_NAME} names it: the original may "
            f"have been copied over it. {_VERIFY}"
        )
    return header


def _stored(folder: Place, file: str, header: Header, info: TensorInfo) -> StoredTensor:
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise ManifestError(f"{folder / file}: tensor {info.name!r} has the dtype {info.dtype}, which torch lacks.")
    return StoredTensor(info.name, dtype, torch_shape(info.dtype, info.shape), file, header.data_start + info.start)


def _with_restored(
    folder: Place, manifest: Manifest, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    """All tensors, before each one in the kernels' order the same row-major.

    Raises:
        ManifestError: what is stored for one is not as the manifest says.
    """
    laid_out = manifest.laid_out
    for stored, tensor in tensors.items():
        if stored not in laid_out:
            yield stored, tensor
            continue
        name, layout = laid_out[stored].name, laid_out[stored].layout
        if name in tensors or (tensor.dtype, tensor.shape) != (torch.uint8, layout.shape):
            beside = f" beside {name!r}" if name in tensors else ""
            raise ManifestError(
                f"{folder / tensor.file}: tensor {stored!r} is {tensor.dtype} {list(tensor.shape)}{beside}, but "
                f"{MANIFEST_NAME} says that it holds {name!r}, as torch.uint8 {list(layout.shape)}. {_VERIFY}"
            )
        banded = BandedWeight(layout.shape, laid_out[stored].content)
        yield name, tensor._replace(name=name, dtype=TORCH_DTYPES[layout.dtype], banded=banded, is_restored=True)
        yield stored, tensor._replace(banded=banded)


def _check_names(folder: Place, manifest: Manifest, tensors: Mapping[str, StoredTensor]) -> None:
    absent = [name for name in _named_tensors(manifest) if name not in tensors]
    if absent:
        raise ManifestError(
            f"{folder / MANIFEST_NAME} names {len(absent):,} tensors that no file holds, {absent[0]!r} among them. "
            f"{_VERIFY}"
        )


def _grids(manifest: Manifest, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, weight in manifest.weights.items():
        shape, stored = tensors[name].shape, tensors[weight.scale].shape
        grid = scale_grid(shape, weight)
        if grid is not None and len(stored) > len(shape) and is_grid(stored, grid):
            yield weight.scale, grid


def _named_tensors(manifest: Manifest) -> Iterator[str]:
    for name, weight in manifest.weights.items():
        yield weight.tensor(name)
        yield weight.scale_tensor
        if weight.kernel_scale not in (None, weight.scale):
            yield weight.kernel_scale
    for name, split in manifest.split.items():
        yield from (name, split.hi, split.lo)

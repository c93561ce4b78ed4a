"""A prepared checkpoint as serving code sees it: its tensors, whole or in parts, with what belongs to them.

Everything about names and formats comes from the manifest and the headers; no name is taken apart here.
"""

from __future__ import annotations

import difflib
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

import torch

import deepinfer_prep
from deepinfer_prep import fp8
from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.files.storage import Place, StoredPlace
from deepinfer_prep.manifest import Manifest, WeightRecord
from deepinfer_prep.naming import MANIFEST_NAME
from deepinfer_prep.quantized import KERNEL_BLOCK
from deepinfer_prep.remote.places import to_place
from deepinfer_prep.runtime.loading.contents import StoredTensor, computed_contents, read_contents
from deepinfer_prep.runtime.loading.gc_pause import collector_paused
from deepinfer_prep.runtime.loading.open_files import OpenFiles
from deepinfer_prep.runtime.loading.remote_file import RemoteTensorFile
from deepinfer_prep.runtime.loading.requests import Batch, Request
from deepinfer_prep.runtime.loading.slices import WHOLE, Grid, Slice, axis_of, in_step, share, unit_of
from deepinfer_prep.runtime.loading.tensor_file import TensorFile
from deepinfer_prep.runtime.loading.transfers import SCRATCH_BYTES, Step
from deepinfer_prep.runtime.loading.verification import Verifier, Verify
from deepinfer_prep.workers import run_parallel

__all__ = ["PreparedCheckpoint", "Request", "StoredTensor", "WeightParts"]

_VALUES_PER_BYTE = {"e4m3": 1, "e2m1": 2}


@dataclass(frozen=True, slots=True, eq=False)
class WeightParts:
    """A quantized weight, or a part of it, with what belongs to it."""

    weight: torch.Tensor
    scale: torch.Tensor
    kernel_scale: torch.Tensor | None
    """uint8, None where the manifest names none; over the same memory as `scale` where they are one tensor."""


class PreparedCheckpoint:
    """An output of `deepinfer-prep convert`, opened for reading.

    Tensors read without `out` on the CPU are views of the files' own pages ("mmap": no copy, shared by all
    processes of a machine) or fresh memory ("pread", for file systems on which mapping is slow). Both are
    filled by several threads before a call returns. A part that is not contiguous in its file, and a tensor
    that is not aligned there, is always copied.

    Args:
        folder: the output: a path, or the URL of a store, s3://bucket/prefix. From a store, parts are ranged reads
            into fresh memory, whatever `access` says, and gaps below 1 MiB are read over.
        access: "mmap" or "pread".
        verify: "headers" compares manifest and headers when the checkpoint is opened. "digests" also compares every
            segment of 64 MiB of which something is read with its digest in the manifest, once, while it is read;
            "codes" also looks for fp8 codes above 240 in it. After an error, nothing that was filled is to be used.
        repair: take the folder of an unprepared checkpoint as well, and convert what is read while it is read, in
            memory. The result is that of converting first, bit for bit; it takes as long every time. Tensors are copies
            then, and the sidecar's stay in memory until the checkpoint is closed.
        workers: threads that read; defaults to twice the processors of this process, at most 16.

    Raises:
        RefusedError: the folder is to be repaired, and a conversion of it would be refused.
        ManifestError: the folder is no finished output, one of another format, or its files are not those that
            the manifest describes.
        ContainerError: a file is damaged.
    """

    def __init__(
        self,
        folder: str | Path | StoredPlace,
        *,
        access: Literal["mmap", "pread"] = "mmap",
        verify: Verify = "headers",
        repair: bool = False,
        workers: int | None = None,
    ) -> None:
        if verify not in get_args(Verify):
            raise ValueError(f"verify is {verify!r}; it has to be one of {', '.join(map(repr, get_args(Verify)))}")
        self.folder: Place = to_place(folder)
        self.access = access
        self.workers = workers or min(16, 2 * len(os.sched_getaffinity(0)))
        self._files: Mapping[str, TensorFile | RemoteTensorFile]
        with collector_paused():
            if repair and not (self.folder / MANIFEST_NAME).exists():
                if verify != "headers":
                    raise ValueError(f"verify={verify!r} compares with digests, which a folder to repair does not have")
                # Through the package's front door, which loads the converter only now.
                computed = deepinfer_prep.compute_output(self.folder)
                contents = computed_contents(self.folder, computed)
                self._files = {name: RemoteTensorFile(place) for name, place in computed.places.items()}
            else:
                contents = read_contents(self.folder)
                self._files = _open_files(self.folder, contents.manifest)
        self.manifest: Manifest = contents.manifest
        self.tensors: Mapping[str, StoredTensor] = contents.tensors
        """Every tensor by name, those of the sidecar last.

        A weight in the kernels' order is there under its own name, read row-major, and under the name that its bytes
        are stored under, as uint8: parts of these are in the kernels' order as well, and have to be whole bands.
        """
        self._grids = contents.grids
        self._verifier = None
        if verify != "headers":
            self._verifier = self._make_verifier(codes=verify == "codes")
        self._lock = threading.Lock()
        self._bytes_read = 0

    def _make_verifier(self, codes: bool) -> Verifier:
        local = {name: file for name, file in self._files.items() if isinstance(file, TensorFile)}
        if len(local) < len(self._files):
            raise CheckpointError(
                f"{self.folder}: digests are compared while loading only from files of this machine, as whole segments "
                f'are read. Open it with verify="headers", and run `deepinfer-prep verify {self.folder}` once.',
                code="verify-remote",
            )
        return Verifier(local, self.manifest, self.tensors, codes=codes, mapped=self.access == "mmap")

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the main shards, which are those of the source, in the order of their files."""
        sidecar = frozenset(self.manifest.sidecar)
        return tuple(
            name
            for name, tensor in self.tensors.items()
            if tensor.file not in sidecar and (tensor.banded is None or tensor.is_restored)
        )

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from the files so far, with what was read only to be skipped."""
        return self._bytes_read

    def tensor(self, name: str) -> StoredTensor:
        """What the headers say about a tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        found = self.tensors.get(name)
        if found is None:
            near = difflib.get_close_matches(name, self.tensors, n=3)
            hint = f" The nearest are {', '.join(map(repr, near))}." if near else ""
            raise CheckpointError(f"{self.folder} has no tensor {name!r}.{hint}")
        return found

    def read(
        self, name: str, part: Slice = WHOLE, *, out: torch.Tensor | None = None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Read one tensor or a part of it.

        Args:
            part: which experts, rows and columns.
            out: is filled and returned; on any device, of any strides.
            device: where a new tensor is made if there is no `out`.

        Raises:
            CheckpointError: no such tensor, or `out` has another shape or dtype.
            SliceError: the part does not lie in the tensor.
            PrepError: a file was cut while it was being read.
        """
        return self.read_all([Request(name, part, out)], device=device)[0]

    def read_weight(self, name: str, part: Slice = WHOLE, *, device: torch.device | str = "cpu") -> WeightParts:
        """Read a quantized weight, or a part of it, with its scale and kernel scale cut in step.

        Raises:
            CheckpointError: the manifest has no quantized weight of that name.
            SliceError: the part does not lie in the weight, or cuts through a block that shares a scale.
            PrepError: a file was cut while it was being read.
        """
        record = self.record(name)
        requests = [Request(name, part), Request(record.scale, self.scale_part(name, part))]
        if record.kernel_scale not in (None, record.scale):
            requests.append(Request(str(record.kernel_scale), self.kernel_scale_part(name, part)))
        weight, scale, *others = self.read_all(requests, device=device)
        scales = [scale.view(self.grid(record.scale)) if part.is_whole else scale, *others]
        return WeightParts(weight, scales[0], None if record.kernel_scale is None else scales[-1].view(torch.uint8))

    def read_all(
        self,
        requests: Sequence[Request],
        *,
        device: torch.device | str = "cpu",
        progress: Callable[[int], None] | None = None,
    ) -> list[torch.Tensor]:
        """Read many tensors or parts in parallel; the results are in the order of the requests.

        Besides the results this takes 16 MiB for each worker.

        Args:
            device: where new tensors are made for requests without `out`.
            progress: called from this thread with the wanted bytes of each step.

        Raises:
            CheckpointError: no such tensor, an `out` has another shape or dtype, or bytes are not those that were
                written, where that is checked.
            SliceError: a part does not lie in its tensor.
            PrepError: a file was cut while it was being read.
        """
        batch = Batch(self._files, torch.device(device), mapped=self.access == "mmap")
        results = [batch.add(self._stored(request), request.part, request.out) for request in requests]
        steps: Iterable[Step] = batch.transfers()
        if self._verifier is not None:
            steps = self._verifier.steps(batch.transfers())
        for wanted, read in run_parallel(steps, _carry_out, self.workers, SCRATCH_BYTES):
            with self._lock:
                self._bytes_read += read
            if progress is not None:
                progress(wanted)
        return results

    def grid(self, name: str) -> tuple[int, ...]:
        """The shape of a scale as parts of it count: [rows, columns], whatever axes of 1 it is stored with.

        For any other tensor its own shape.
        """
        return self._grids.get(name) or self.tensor(name).shape

    def record(self, weight: str) -> WeightRecord:
        """What the manifest says about a quantized weight.

        Raises:
            CheckpointError: it has none of that name.
        """
        found = self.manifest.weights.get(self.tensor(weight).name)
        if found is None:
            raise CheckpointError(f"{self.folder}: tensor {weight!r} is no quantized weight, so it has no scale.")
        return found

    def scale_part(self, weight: str, part: Slice) -> Slice:
        """The part of a weight's scale that belongs to a part of the weight.

        Raises:
            CheckpointError: the manifest has no quantized weight of that name.
            SliceError: the part cuts through a block that shares a scale.
        """
        record = self.record(weight)
        if part.is_whole:
            return WHOLE
        return in_step(part, self.tensor(weight).shape, self._scale_grid(record), self._where(weight))

    def kernel_scale_part(self, weight: str, part: Slice) -> Slice:
        """The part of a weight's kernel scale that belongs to a part of the weight.

        Raises:
            CheckpointError: the weight has no kernel scale.
            SliceError: the part cuts through a block of the kernels.
        """
        record = self.record(weight)
        grid = self._kernel_grid(record)
        if grid is None:
            raise CheckpointError(f"{self._where(weight)} has no kernel scale: {record.reason}.")
        return WHOLE if part.is_whole else in_step(part, self.tensor(weight).shape, grid, self._where(weight))

    def share(self, name: str, axis: Literal["experts", "rows", "columns"], rank: int, world: int) -> Slice:
        """The part of a tensor that one rank of several takes along an axis, cut where its scales allow it.

        Whole blocks are spread as evenly as they go, and the last rank's part ends at the tensor's edge.

        Args:
            name: of a weight or another tensor; for a scale, use `scale_part` with its weight's part.

        Raises:
            SliceError: there is no such rank or axis.
        """
        shape = self.tensor(name).shape
        size = shape[axis_of(axis, len(shape), self._where(name))]
        return Slice(**{axis: share(size, self._unit(name, axis), rank, world)})

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> PreparedCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, request: Request) -> StoredTensor:
        tensor = self.tensor(request.name)
        return tensor if request.part.is_whole else tensor._replace(shape=self.grid(request.name))

    def _where(self, name: str) -> str:
        return f"{self.folder / self.tensor(name).file}: tensor {name!r}"

    def _scale_grid(self, record: WeightRecord) -> Grid:
        return Grid(_stored_block(record, record.block), self.grid(record.scale))

    def _kernel_grid(self, record: WeightRecord) -> Grid | None:
        if record.kernel_scale is None:
            return None
        block = (1 if record.element == "e2m1" else KERNEL_BLOCK, KERNEL_BLOCK)
        return Grid(_stored_block(record, block), self.grid(record.kernel_scale))

    def _unit(self, name: str, axis: str) -> int:
        record = self.manifest.weights.get(name)
        if axis == "experts" or record is None:
            return 1
        shape, where = self.tensor(name).shape, self._where(name)
        grids = (self._scale_grid(record), self._kernel_grid(record))
        return math.lcm(*(unit_of(axis, shape, grid, where) for grid in grids if grid is not None))


def _carry_out(step: Step, scratch: fp8.U8) -> tuple[int, int]:
    """Bytes that were asked for, and bytes read."""
    return step.nbytes, step.run(scratch)


def _open_files(folder: Place, manifest: Manifest) -> dict[str, TensorFile | RemoteTensorFile]:
    names, opened = (*manifest.shards, *manifest.sidecar), OpenFiles()
    return {name: _tensor_file(folder / name, manifest.files[name].size, opened) for name in names}


def _tensor_file(place: Place, size: int, opened: OpenFiles) -> TensorFile | RemoteTensorFile:
    return TensorFile(place, size, opened) if isinstance(place, Path) else RemoteTensorFile(place)


def _stored_block(record: WeightRecord, block: tuple[int, int] | None) -> tuple[int, int] | None:
    """A block in stored elements: a byte of e2m1 holds two columns."""
    return None if block is None else (block[0], max(1, block[1] // _VALUES_PER_BYTE[record.element]))

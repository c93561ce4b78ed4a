"""Requests for parts of tensors, turned into result tensors and the transfers that fill them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.runtime.dtypes import holds_same_bytes
from deepinfer_prep.runtime.loading.banded_layout import BandedLayout
from deepinfer_prep.runtime.loading.contents import StoredTensor
from deepinfer_prep.runtime.loading.remote_file import RemoteTensorFile
from deepinfer_prep.runtime.loading.slices import WHOLE, Bounds, Slice, bounds_of, shape_of
from deepinfer_prep.runtime.loading.tensor_file import TensorFile, new_host_tensor
from deepinfer_prep.runtime.loading.transfers import (
    Fill,
    RestoredFill,
    Transfer,
    fill_transfers,
    populate_transfers,
    restore_transfers,
)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A part of a tensor to read; into `out`, a tensor of the part's shape and dtype, where that is given."""

    name: str
    part: Slice = WHOLE
    out: torch.Tensor | None = None


class Batch:
    """Collects requests; a result's bytes count once every transfer was carried out.

    Args:
        device: where results are made for requests without `out`.
        mapped: whether they may be views of the files' pages.
    """

    def __init__(self, files: Mapping[str, TensorFile | RemoteTensorFile], device: torch.device, mapped: bool) -> None:
        self._files, self._device = files, device
        self._mapped = mapped and device.type == "cpu"
        self._views: dict[str, list[tuple[int, int]]] = {}
        self._fills: dict[str, list[Fill]] = {}
        self._restored: dict[str, list[RestoredFill]] = {}

    def add(self, tensor: StoredTensor, part: Slice, out: torch.Tensor | None) -> torch.Tensor:
        """Take a request and return the tensor that will hold the result.

        Raises:
            CheckpointError: `out` has another shape or dtype.
            SliceError: the part does not lie in the tensor.
        """
        layout, where = tensor.layout, f"{self._files[tensor.file].place}: tensor {tensor.name!r}"
        if tensor.is_restored and isinstance(layout, BandedLayout):
            return self._add_restored(tensor, layout, bounds_of(part, tensor.shape, where), out, where)
        if out is None and part.is_whole:
            view = self._view(tensor, tensor.start, tensor.shape)
            if view is not None:
                return view
        bounds = bounds_of(part, tensor.shape, where)
        shape = shape_of(bounds)
        if isinstance(layout, BandedLayout):
            layout.check(bounds, where)
        if out is None:
            runs = layout.runs(bounds)
            view = self._view(tensor, runs.start, shape) if runs is not None and runs.count == 1 else None
            if view is not None:
                return view
            out = self._new(shape, tensor.dtype)
        else:
            _check_out(out, shape, tensor.dtype, where)
        if out.numel():
            target = out.detach() if out.dtype == tensor.dtype else out.detach().view(tensor.dtype)
            self._fills.setdefault(tensor.file, []).append(Fill(self._files[tensor.file], layout, bounds, target))
        return out

    def _add_restored(
        self, tensor: StoredTensor, layout: BandedLayout, bounds: Bounds, out: torch.Tensor | None, where: str
    ) -> torch.Tensor:
        if out is None:
            out = self._new(shape_of(bounds), tensor.dtype)
        _check_out(out, shape_of(bounds), tensor.dtype, where)
        if out.numel():
            fill = RestoredFill(self._files[tensor.file], layout, bounds, out.detach())
            self._restored.setdefault(tensor.file, []).append(fill)
        return out

    def transfers(self) -> Iterator[Transfer]:
        """All steps, in the order of the files."""
        for name, file in self._files.items():
            if isinstance(file, TensorFile):
                yield from populate_transfers(file, sorted(self._views.get(name, ())))
            yield from fill_transfers(sorted(self._fills.get(name, ()), key=_first_byte))
            for restored in sorted(self._restored.get(name, ()), key=_first_byte):
                yield from restore_transfers(restored)

    def _view(self, tensor: StoredTensor, start: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A view of contiguous bytes; None where they have to be copied."""
        item_bytes = tensor.dtype.itemsize
        nbytes = math.prod(shape) * item_bytes
        file = self._files[tensor.file]
        if not self._mapped or not isinstance(file, TensorFile) or nbytes == 0 or start % item_bytes:
            return None
        self._views.setdefault(tensor.file, []).append((start, start + nbytes))
        return file.view(start, tensor.dtype, shape)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._device.type == "cpu":
            return new_host_tensor(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)


def _first_byte(fill: Fill | RestoredFill) -> tuple[int, Bounds]:
    return fill.layout.start, fill.bounds


def _check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> None:
    if out.device.type == "meta":
        raise CheckpointError(f"{where} cannot be read into a tensor on the meta device.")
    if tuple(out.shape) != shape or not holds_same_bytes(dtype, out.dtype):
        raise CheckpointError(f"{where}: expected room for {dtype} {list(shape)}, found {out.dtype} {list(out.shape)}.")

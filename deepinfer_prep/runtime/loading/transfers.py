"""Moving parts of tensors from files into memory: a plan of bounded steps that a few threads carry out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deepinfer_prep import fp8
from deepinfer_prep.files.storage import MOST_BUFFERS
from deepinfer_prep.kernel_layout import Content, Transposer
from deepinfer_prep.runtime.loading.banded_layout import BandedLayout
from deepinfer_prep.runtime.loading.byte_layout import ByteRuns, FileLayout
from deepinfer_prep.runtime.loading.remote_file import RemoteTensorFile
from deepinfer_prep.runtime.loading.slices import Bounds, Range
from deepinfer_prep.runtime.loading.tensor_file import TensorFile

LIMIT_BYTES = 8 * 1024 * 1024
"""What one step reads into memory at most."""

_POPULATE_BYTES = 64 * 1024 * 1024
"""What one step brings in of mapped pages at most: a GB in the page cache takes a few milliseconds, so handing out
steps must not cost more."""

SCRATCH_BYTES = 2 * LIMIT_BYTES + Transposer.MEMORY_BYTES
"""What a thread needs besides: one step's bytes, the same again where gaps are read with them, and what puts bands back
into the stored order."""


class Step(Protocol):
    """One step; `nbytes` are the bytes that were asked for."""

    @property
    def nbytes(self) -> int: ...

    def run(self, scratch: fp8.U8) -> int:
        """Carry it out, with `SCRATCH_BYTES` of memory to use, and return how many bytes were read."""


class Transfer(Step, Protocol):
    """A step that delivers bytes between `start` and `end` of a file."""

    @property
    def file(self) -> TensorFile | RemoteTensorFile: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Populate:
    """Bring mapped pages into memory."""

    file: TensorFile
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def run(self, scratch: fp8.U8) -> int:
        return self.file.populate(self.start, self.end)


@dataclass(frozen=True, slots=True)
class Scatter:
    """Read consecutive bytes into memory that belongs to one or many tensors."""

    file: TensorFile | RemoteTensorFile
    start: int
    buffers: tuple[fp8.U8, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def run(self, scratch: fp8.U8) -> int:
        self.file.read_scattered([buffer.data for buffer in self.buffers], self.start)
        return self.nbytes

    @property
    def last_start(self) -> int:
        """The last byte at which it can be split."""
        return self.end - 1

    def split(self, edge: int) -> tuple[Scatter, Scatter]:
        """The steps before and from a byte between `start` and `end`."""
        before, after, position = [], [], self.start
        for buffer in self.buffers:
            cut = min(max(edge - position, 0), len(buffer))
            before.append(buffer[:cut])
            after.append(buffer[cut:])
            position += len(buffer)
        return (
            Scatter(self.file, self.start, tuple(buffer for buffer in before if buffer.size)),
            Scatter(self.file, edge, tuple(buffer for buffer in after if buffer.size)),
        )


@dataclass(frozen=True, slots=True)
class _OfRuns:
    """What is the same for all steps that read equal runs of bytes at equal distances."""

    file: TensorFile | RemoteTensorFile
    runs: ByteRuns

    @property
    def start(self) -> int:
        return self.runs.start

    @property
    def end(self) -> int:
        return self.runs.start + self.runs.span

    @property
    def nbytes(self) -> int:
        return self.runs.nbytes


@dataclass(frozen=True, slots=True)
class Gather(_OfRuns):
    """Read pieces of rows into contiguous memory."""

    out: fp8.U8

    def run(self, scratch: fp8.U8) -> int:
        return self.file.read_runs(self.runs, self.out, scratch)

    @property
    def last_start(self) -> int:
        """The last byte at which it can be split."""
        return self.runs.start + (self.runs.count - 1) * self.runs.stride

    def split(self, edge: int) -> tuple[Gather, Gather]:
        """The steps with the runs that begin before a byte and with the others; both have some."""
        before, after = self.runs.split(-(-(edge - self.start) // self.runs.stride))
        return (
            Gather(self.file, before, self.out[: before.nbytes]),
            Gather(self.file, after, self.out[before.nbytes :]),
        )


@dataclass(frozen=True, slots=True)
class Stage(_OfRuns):
    """Read through host memory into a tensor on another device, or one that is not contiguous."""

    out: torch.Tensor

    def run(self, scratch: fp8.U8) -> int:
        staged, rest = scratch[: self.runs.nbytes], scratch[LIMIT_BYTES:]
        read = self.file.read_runs(self.runs, staged, rest)
        # Codes travel as plain bytes: not every device copies every fp8 dtype.
        out = self.out.view(torch.uint8) if self.out.element_size() == 1 else self.out
        out.copy_(torch.from_numpy(staged).view(out.dtype).view(out.shape))
        return read


@dataclass(frozen=True, slots=True)
class Restore:
    """Read columns of one band of a weight in the kernels' order, and put some of its rows into a row-major tensor."""

    file: TensorFile | RemoteTensorFile
    start: int
    band_rows: int
    rows: Range
    """Of the band."""
    content: Content
    out: torch.Tensor
    """[rows, columns in bytes]"""

    @property
    def end(self) -> int:
        return self.start + self.band_rows * self.out.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.out.numel()

    def run(self, scratch: fp8.U8) -> int:
        columns = self.out.shape[-1]
        size = self.band_rows * columns
        ordered, restored = scratch[:size], scratch[LIMIT_BYTES:][:size].reshape(self.band_rows, columns)
        self.file.read_scattered([ordered.data], self.start)
        transposer = Transposer(scratch[2 * LIMIT_BYTES :])
        transposer.to_stored_order(ordered.reshape(columns, self.band_rows), restored, self.content)
        self.out.copy_(torch.from_numpy(restored[slice(*self.rows)]))
        return size


@dataclass(frozen=True, slots=True)
class Fill:
    """A tensor and the part of a stored tensor that fills it."""

    file: TensorFile | RemoteTensorFile
    layout: FileLayout | BandedLayout
    bounds: Bounds
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class RestoredFill:
    """A row-major tensor and the part of a weight in the kernels' order that fills it."""

    file: TensorFile | RemoteTensorFile
    layout: BandedLayout
    bounds: Bounds
    out: torch.Tensor


def populate_transfers(file: TensorFile, extents: Sequence[tuple[int, int]]) -> Iterator[Transfer]:
    """Steps that bring (start, end) extents of a mapped file, in order, into memory; neighbours go together."""
    # Little is cut small all the same, so that all threads have a part of it to wait for.
    share = sum(end - start for start, end in extents) // 16
    step = min(max(share, LIMIT_BYTES), _POPULATE_BYTES)
    for first, last in _joined_extents(extents):
        for start in range(first, last, step):
            yield Populate(file, start, min(start + step, last))


def fill_transfers(fills: Iterable[Fill]) -> Iterator[Transfer]:
    """Steps that fill tensors; neighbours in a file are read together, so give them in the order of the file."""
    waiting: list[Scatter] = []
    for transfer in _separate(fills):
        if not isinstance(transfer, Scatter):
            yield transfer
            continue
        if waiting and not _can_join(waiting, transfer):
            yield _joined(waiting)
            waiting = []
        waiting.append(transfer)
    if waiting:
        yield _joined(waiting)


def restore_transfers(fill: RestoredFill) -> Iterator[Transfer]:
    """Steps that fill a row-major tensor of one-byte elements from a weight in the kernels' order."""
    out = fill.out.view(torch.uint8)
    top = fill.bounds[-2][0]
    for matrix, start, one in fill.layout.slices(fill.bounds):
        step = max(1, LIMIT_BYTES // one.band.rows)
        target = out[matrix[0][0] - fill.bounds[0][0]] if matrix else out
        first = one.band.first + one.first_row - top
        target = target[first : first + one.end_row - one.first_row]
        for column in range(0, one.columns, step):
            yield Restore(
                fill.file,
                start + column * one.band.rows,
                one.band.rows,
                (one.first_row, one.end_row),
                fill.layout.weight.content,
                target[:, column : min(column + step, one.columns)],
            )


def _joined_extents(extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first = last = 0
    for start, end in extents:
        if start > last:
            yield first, last
            first = start
        last = max(last, end)
    yield first, last


def _separate(fills: Iterable[Fill]) -> Iterator[Transfer]:
    for fill in fills:
        is_direct = fill.out.device.type == "cpu" and fill.out.is_contiguous()
        for runs, bounds in fill.layout.pieces(fill.bounds, LIMIT_BYTES):
            part = _part(fill, bounds)
            if not is_direct:
                yield Stage(fill.file, runs, part)
            elif runs.count == 1:
                yield Scatter(fill.file, runs.start, (_bytes(part),))
            else:
                yield Gather(fill.file, runs, _bytes(part))


def _can_join(waiting: list[Scatter], next_one: Scatter) -> bool:
    first, last = waiting[0], waiting[-1]
    end = next_one.start + next_one.nbytes
    return (
        last.file is next_one.file
        and last.start + last.nbytes == next_one.start
        and end - first.start <= LIMIT_BYTES
        and len(waiting) < MOST_BUFFERS
    )


def _joined(waiting: list[Scatter]) -> Scatter:
    return Scatter(waiting[0].file, waiting[0].start, tuple(buffer for one in waiting for buffer in one.buffers))


def _part(fill: Fill, bounds: Bounds) -> torch.Tensor:
    if bounds == fill.bounds:
        return fill.out
    narrowed = zip(bounds, fill.bounds, strict=True)
    return fill.out[tuple(slice(start - base, stop - base) for (start, stop), (base, _) in narrowed)]


def _bytes(tensor: torch.Tensor) -> fp8.U8:
    # Not reshape: a contiguous tensor may have axes of one element with any stride.
    flat: fp8.U8 = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat

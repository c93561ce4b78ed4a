"""Bytes checked while they are read: the manifest's digests, and that no fp8 code lies above 240."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
import stringzilla
import xxhash

from deepinfer_prep import fp8
from deepinfer_prep.errors import CheckpointError, list_some
from deepinfer_prep.files import segments
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.manifest import Manifest
from deepinfer_prep.runtime.loading.byte_layout import ByteRuns
from deepinfer_prep.runtime.loading.contents import StoredTensor
from deepinfer_prep.runtime.loading.tensor_file import TensorFile
from deepinfer_prep.runtime.loading.transfers import LIMIT_BYTES, Gather, Scatter, Step, Transfer

Verify = Literal["headers", "digests", "codes"]
"""How far an output is checked: what headers say, the digest of every segment that is read, fp8 codes as well."""

_PIECE_BYTES = 4 * 1024 * 1024
"""What is hashed at once of mapped pages, while the kernel reads ahead."""

_ABOVE_240 = bytes(fp8.ABOVE_240_CODES)
_REMEDY = "`deepinfer-prep verify` checks the whole folder; copy it again or convert the checkpoint again."


@dataclass(frozen=True, slots=True)
class CodeRange:
    """The bytes of an e4m3 weight in a file."""

    name: str
    start: int
    end: int
    banded: BandedWeight | None
    """Of a weight in the kernels' order."""

    def element(self, position: int) -> int:
        """The index of the element whose code is at a byte of the file."""
        offset = position - self.start
        return offset if self.banded is None else self.banded.stored_offset(offset)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a file and what its bytes have to be."""

    file: TensorFile
    start: int
    end: int
    digest: str
    tensors: tuple[str, ...]
    """The names of the tensors in it, for the message."""
    codes: tuple[CodeRange, ...]
    """The weights whose codes are checked."""


class _Check:
    """Takes the bytes of a segment in order, each once, and says at the end whether they are the right ones."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._digest = xxhash.xxh3_128()
        self.position = segment.start
        """Where the bytes that were not seen yet begin."""

    def see(self, start: int, data: fp8.U8) -> None:
        """Take what is new of bytes that were read at `start`, which is not beyond `position`."""
        new = data[self.position - start : self._segment.end - start]
        if new.size:
            self._check_codes(new)
            self._digest.update(new.data)
            self.position += new.size

    def finish(self) -> None:
        """Compare; every byte was seen.

        Raises:
            CheckpointError: the bytes are not those that were written.
        """
        segment = self._segment
        if self._digest.hexdigest() != segment.digest:
            raise CheckpointError(
                f"{segment.file.place}: bytes {segment.start:,} to {segment.end:,} are not those that were written: "
                f"their digest is not the one in the manifest. They hold {list_some(segment.tensors, 3, repr)}. "
                f"{_REMEDY}",
                code="bad-digest",
            )

    def _check_codes(self, chunk: fp8.U8) -> None:
        position = self.position
        for weight in self._segment.codes:
            first, last = max(weight.start, position), min(weight.end, position + chunk.size)
            codes = chunk[first - position : max(first, last) - position]
            index = stringzilla.find_first_of(codes.data, _ABOVE_240) if codes.size else -1
            if index >= 0:
                code, element = int(codes[index]), weight.element(first + index)
                raise CheckpointError(
                    f"{self._segment.file.place}: tensor {weight.name!r}: element {element:,} is the fp8 code "
                    f"0x{code:02x} ({fp8.decode_e4m3fn(code):g}), which the hardware reads as infinity or NaN: no "
                    f"converted weight holds it. {_REMEDY}",
                    code="bad-value",
                )


@dataclass(frozen=True, slots=True)
class CheckMapped:
    """One step: the mapped pages of a segment are brought in and checked piece by piece.

    The kernel reads ahead while a piece is hashed, and nothing is copied.
    """

    segment: Segment
    passed: Callable[[], None]
    """Called once the bytes are known to be right."""

    @property
    def nbytes(self) -> int:
        """No bytes that were asked for: those are counted by the steps that deliver them."""
        return 0

    def run(self, scratch: fp8.U8) -> int:
        """Read and check.

        Raises:
            CheckpointError: the bytes are not those that were written, or a code lies above 240.
            PrepError: the file was cut.
        """
        segment, check = self.segment, _Check(self.segment)
        segment.file.fetch(segment.start, segment.end)
        for start in range(segment.start, segment.end, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, segment.end)
            segment.file.populate(start, end)
            check.see(start, segment.file.mapped_bytes(start, end))
        check.finish()
        self.passed()
        return segment.end - segment.start


@dataclass(frozen=True, slots=True)
class ReadChecked:
    """One step: a segment is read once and in order, into the memory it is for, and checked while it is at hand.

    What nothing is waiting for goes through the scratch memory.
    """

    segment: Segment
    transfers: Sequence[Transfer]
    """Those that begin in the segment, by their first byte."""
    passed: Callable[[], None]
    """Called once the bytes are known to be right."""

    @property
    def nbytes(self) -> int:
        """The bytes that were asked for."""
        return sum(transfer.nbytes for transfer in self.transfers)

    def run(self, scratch: fp8.U8) -> int:
        """Read and check. Errors as `CheckMapped.run`."""
        self.segment.file.fetch(self.segment.start, self.segment.end)
        reader = _CheckedFile(self.segment, scratch[LIMIT_BYTES:])
        for transfer in self.transfers:
            replace(transfer, file=reader).run(scratch)  # type: ignore[type-var]  # All of them are dataclasses.
        reader.finish()
        self.passed()
        return reader.bytes_read


class _CheckedFile:
    """Reads a file as `TensorFile` does, but skips nothing of one segment, and checks it on the way."""

    def __init__(self, segment: Segment, scratch: fp8.U8) -> None:
        self._segment, self._scratch = segment, scratch
        self._check = _Check(segment)
        self.bytes_read = 0

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._skip_to(offset)
        self._segment.file.read_scattered(buffers, offset)
        for buffer in buffers:
            self._see(offset, np.frombuffer(buffer, dtype=np.uint8))
            offset += len(buffer)

    def read_runs(self, runs: ByteRuns, out: fp8.U8, scratch: fp8.U8) -> int:
        if runs.count == 1:
            self.read_scattered([out.data], runs.start)
            return runs.run
        at_once = max(1, LIMIT_BYTES // runs.stride)
        for first in range(0, runs.count, at_once):
            count = min(at_once, runs.count - first)
            part = ByteRuns(runs.start + first * runs.stride, runs.run, count, runs.stride)
            self._read_group(part, out[first * runs.run : (first + count) * runs.run], scratch)
        return runs.span

    def finish(self) -> None:
        """Read and see the rest of the segment, and compare."""
        self._skip_to(self._segment.end)
        self._check.finish()

    def _read_group(self, runs: ByteRuns, out: fp8.U8, scratch: fp8.U8) -> None:
        if runs.count == 1:
            self.read_scattered([out.data], runs.start)
            return
        self._skip_to(runs.start)
        whole = scratch[: runs.span]
        self._segment.file.read_into(whole.data, runs.start)
        self._see(runs.start, whole)
        shape = (runs.count, runs.run)
        np.copyto(out.reshape(shape), np.lib.stride_tricks.as_strided(whole, shape, (runs.stride, 1)))

    def _skip_to(self, offset: int) -> None:
        end = min(offset, self._segment.end)
        while self._check.position < end:
            position = self._check.position
            gap = self._scratch[: end - position]
            self._segment.file.read_into(gap.data, position)
            self._see(position, gap)

    def _see(self, start: int, data: fp8.U8) -> None:
        self._check.see(start, data)
        self.bytes_read += data.size


class Verifier:
    """The segments that are still to be checked; each is checked once, when the first of its bytes is read."""

    def __init__(
        self,
        files: Mapping[str, TensorFile],
        manifest: Manifest,
        tensors: Mapping[str, StoredTensor],
        *,
        codes: bool,
        mapped: bool,
    ) -> None:
        self._files, self._manifest, self._mapped = files, manifest, mapped
        self._names = {file: name for name, file in files.items()}
        self._checked: set[tuple[str, int]] = set()
        self._tensors: dict[str, list[StoredTensor]] = {name: [] for name in files}
        for tensor in tensors.values():
            if tensor.banded is None or tensor.is_restored:
                self._tensors[tensor.file].append(tensor)
        halved = (name for name, record in manifest.weights.items() if record.element == "e4m3")
        self._halved = frozenset({*halved, *manifest.unscaled}) if codes else frozenset()

    def steps(self, transfers: Iterable[Transfer]) -> Iterator[Step]:
        """The same steps, file by file, with checks of all segments that they read of and that were not checked."""
        for file, group in groupby(transfers, key=lambda transfer: transfer.file):
            assert isinstance(file, TensorFile)  # Nothing else is verified.
            steps = self._mapped_steps if self._mapped else self._reading_steps
            yield from steps(self._names[file], group)

    def _mapped_steps(self, name: str, transfers: Iterable[Transfer]) -> Iterator[Step]:
        planned: set[int] = set()
        for transfer in transfers:
            for number in self._unchecked(name, transfer):
                if number not in planned:
                    planned.add(number)
                    yield CheckMapped(self._segment(name, number), self._passing(name, number))
            yield transfer

    def _reading_steps(self, name: str, transfers: Iterable[Transfer]) -> Iterator[Step]:
        unchecked: set[int] = set()
        beginning: dict[int, list[Transfer]] = {}
        for transfer in (part for whole in transfers for part in _parts(whole)):
            beginning.setdefault(transfer.start // segments.SEGMENT_BYTES, []).append(transfer)
            unchecked.update(self._unchecked(name, transfer))
        for number in sorted({*beginning, *unchecked}):
            here = sorted(beginning.get(number, ()), key=lambda transfer: transfer.start)
            if number in unchecked:
                yield ReadChecked(self._segment(name, number), here, self._passing(name, number))
            else:
                yield from here

    def _unchecked(self, name: str, transfer: Transfer) -> list[int]:
        size = segments.SEGMENT_BYTES
        numbers = range(transfer.start // size, -(-transfer.end // size))
        return [number for number in numbers if (name, number) not in self._checked]

    def _passing(self, name: str, number: int) -> Callable[[], None]:
        return lambda: self._checked.add((name, number))

    def _segment(self, name: str, number: int) -> Segment:
        record = self._manifest.files[name]
        start = number * segments.SEGMENT_BYTES
        end = min(start + segments.SEGMENT_BYTES, record.size)
        inside = [one for one in self._tensors[name] if one.start < end and one.start + one.nbytes > start]
        codes = tuple(
            CodeRange(one.name, one.start, one.start + one.nbytes, one.banded)
            for one in inside
            if one.name in self._halved
        )
        names = tuple(one.name for one in inside)
        return Segment(self._files[name], start, end, record.digests[number], names, codes)


def _parts(transfer: Transfer) -> Iterator[Transfer]:
    """A step cut where segments meet, as far as it can be; else it also reads of the next segment."""
    while isinstance(transfer, Scatter | Gather):
        edge = (transfer.start // segments.SEGMENT_BYTES + 1) * segments.SEGMENT_BYTES
        if transfer.last_start < edge:
            break
        before, transfer = transfer.split(edge)
        yield before
    yield transfer

"""Bytes checked while they are read: the manifest's digests, and that no fp8 code lies above 240."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import stringzilla
import xxhash

from deepinfer_prep import fp8
from deepinfer_prep.errors import CheckpointError, list_some
from deepinfer_prep.files import segments
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.manifest import Manifest
from deepinfer_prep.runtime.loading.contents import StoredTensor
from deepinfer_prep.runtime.loading.tensor_file import TensorFile
from deepinfer_prep.runtime.loading.transfers import LIMIT_BYTES

Verify = Literal["headers", "digests", "codes"]
"""How far an output is checked: what headers say, the digest of every segment that is read, fp8 codes as well."""

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
class CheckSegment:
    """One step of reading: a segment of a file is read whole and compared with its digest in the manifest."""

    file: TensorFile
    start: int
    end: int
    digest: str
    tensors: tuple[str, ...]
    """The names of the tensors in it, for the message."""
    codes: tuple[CodeRange, ...]
    """The weights whose codes are checked."""
    mapped: bool

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
        digest, read = xxhash.xxh3_128(), 0
        for position, chunk in self._chunks(scratch):
            self._check_codes(position, chunk)
            digest.update(chunk.data)
            read += chunk.size
        if digest.hexdigest() != self.digest:
            raise CheckpointError(
                f"{self.file.place}: bytes {self.start:,} to {self.end:,} are not those that were written: their "
                f"digest is not the one in the manifest. They hold {list_some(self.tensors, 3, repr)}. {_REMEDY}",
                code="bad-digest",
            )
        return read

    def _chunks(self, scratch: fp8.U8) -> Iterator[tuple[int, fp8.U8]]:
        if self.mapped:
            self.file.populate(self.start, self.end)
            yield self.start, self.file.mapped_bytes(self.start, self.end)
            return
        for position in range(self.start, self.end, LIMIT_BYTES):
            chunk = scratch[: min(LIMIT_BYTES, self.end - position)]
            self.file.read_into(chunk.data, position)
            yield position, chunk

    def _check_codes(self, position: int, chunk: fp8.U8) -> None:
        for weight in self.codes:
            first, last = max(weight.start, position), min(weight.end, position + chunk.size)
            codes = chunk[first - position : max(first, last) - position]
            index = stringzilla.find_first_of(codes.data, _ABOVE_240) if codes.size else -1
            if index >= 0:
                code, element = int(codes[index]), weight.element(first + index)
                raise CheckpointError(
                    f"{self.file.place}: tensor {weight.name!r}: element {element:,} is the fp8 code 0x{code:02x} "
                    f"({fp8.decode_e4m3fn(code):g}), which the hardware reads as infinity or NaN: no converted weight "
                    f"holds it. {_REMEDY}",
                    code="bad-value",
                )


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
        self._checked: set[tuple[str, int]] = set()
        self._tensors: dict[str, list[StoredTensor]] = {name: [] for name in files}
        for tensor in tensors.values():
            if tensor.banded is None or tensor.is_restored:
                self._tensors[tensor.file].append(tensor)
        halved = (name for name, record in manifest.weights.items() if record.element == "e4m3")
        self._halved = frozenset({*halved, *manifest.unscaled}) if codes else frozenset()

    def steps(self, extents: Iterable[tuple[str, int, int]]) -> list[CheckSegment]:
        """Steps for all segments that hold some of these bytes (file, start, end) and were not checked before."""
        wanted = {
            (name, number)
            for name, start, end in extents
            for number in range(start // segments.SEGMENT_BYTES, -(-end // segments.SEGMENT_BYTES))
        }
        new = sorted(wanted - self._checked)
        self._checked.update(new)
        return [self._step(name, number) for name, number in new]

    def _step(self, name: str, number: int) -> CheckSegment:
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
        return CheckSegment(self._files[name], start, end, record.digests[number], names, codes, self._mapped)

"""Checks one segment of one output file: digest, fp8 codes and, with a source, every byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import stringzilla
import xxhash

from deepinfer_prep import fp8
from deepinfer_prep.checking.findings import Difference
from deepinfer_prep.errors import ConversionError
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.checkpoint import Shard
from deepinfer_prep.files.container import TensorInfo, tensor_position
from deepinfer_prep.files.segments import segments
from deepinfer_prep.files.storage import FileState, Place, Reader, check_same_here, open_reader
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.quantized import DTYPES
from deepinfer_prep.writing.output_bytes import Tally, output_chunks


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A tensor whose bytes stand in the kernels' order: its name, and where each byte belongs."""

    name: str
    bytes: BandedWeight


@dataclass(frozen=True, slots=True)
class SegmentCheck:
    """Bytes start..end of an output file; `expected` recomputes them from the source, where there is one."""

    name: str
    path: Place
    start: int
    end: int
    digest: str
    shard: Shard | None
    fp8: frozenset[str]
    """The tensors whose codes have to mean the same on the hardware."""
    laid_out: Mapping[str, LaidOut]
    """The tensors whose bytes stand in the kernels' order."""
    expected: OutputFile | None

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class FileChecks:
    """What all segments of one output file are checked against; fields as those of `SegmentCheck`."""

    path: Place
    state: FileState
    digests: tuple[str, ...]
    shard: Shard | None
    expected: OutputFile | None

    def segments(self, name: str) -> Iterator[SegmentItem]:
        """The file's work."""
        for number, (start, end) in enumerate(segments(self.state.size)):
            yield SegmentItem(name, number, start, end)


class SegmentItem(NamedTuple):
    """Segment `number` of a file, its bytes start..end."""

    name: str
    number: int
    start: int
    end: int


class CheckSegment:
    """Checks a segment: the `Work` of a verification."""

    def __init__(
        self, files: Mapping[str, FileChecks], fp8_names: frozenset[str], laid_out: Mapping[str, LaidOut]
    ) -> None:
        self._files = files
        self._fp8_names = fp8_names
        self._laid_out = laid_out

    def check(self) -> None:
        """Make sure that this process sees the same output and source; of a store, its first file is asked for.

        Raises:
            PrepError, OSError: it does not.
        """
        outputs = [(file.path, file.state) for file in self._files.values()]
        expected = [file.expected for file in self._files.values() if file.expected is not None]
        for places in (outputs, [(file.source, file.state) for file in expected]):
            for number, (place, state) in enumerate(places):
                if number == 0 or isinstance(place, Path):
                    check_same_here(place, state)

    def __call__(self, item: SegmentItem, buffer: fp8.U8) -> SegmentFindings:
        """Check one segment."""
        file = self._files[item.name]
        check = SegmentCheck(
            name=item.name,
            path=file.path,
            start=item.start,
            end=item.end,
            digest=file.digests[item.number],
            shard=file.shard,
            fp8=self._fp8_names,
            laid_out=self._laid_out,
            expected=file.expected,
        )
        return check_segment(check, buffer)


@dataclass(slots=True)
class SegmentFindings:
    """Differences of one segment with how many elements or facts each stands for, and NaN codes by tensor."""

    nbytes: int
    differences: list[tuple[Difference, int]] = field(default_factory=list)
    nan_codes: dict[str, int] = field(default_factory=dict)
    """In the output."""
    source: Tally = field(default_factory=Tally)
    """What halving meets in the source's codes of this segment."""


def check_segment(check: SegmentCheck, buffer: fp8.U8) -> SegmentFindings:
    """Read one segment and check it; half of the buffer holds the output's bytes, half the source's."""
    findings = SegmentFindings(check.nbytes)
    digest = xxhash.xxh3_128()
    with closing(open_reader(check.path)) as output:
        for offset, found, expected in _pairs(check, output, buffer, findings):
            digest.update(found.data)
            if expected is not None:
                _compare(check, offset, found, expected, findings)
            _check_codes(check, offset, found, findings)
    if digest.hexdigest() != check.digest:
        problem = (
            f"the digest of bytes {check.start:,} to {check.end:,} is not the one in the manifest: "
            "the file changed after it was written"
        )
        findings.differences.append((Difference(check.name, problem), 1))
    return findings


def _pairs(
    check: SegmentCheck, output: Reader, buffer: fp8.U8, findings: SegmentFindings
) -> Iterator[tuple[int, fp8.U8, fp8.U8 | None]]:
    """Chunks of the output by offset, each with the bytes that the source gives for it."""
    half = buffer.size // 2
    actual, scratch = buffer[:half], buffer[half:]
    position = check.start
    output.expect(check.start, check.end)
    if check.expected is not None:
        try:
            with closing(open_reader(check.expected.source)) as source:
                for offset, expected in output_chunks(
                    check.expected, source, check.start, check.end, scratch, findings.source
                ):
                    yield offset, _read(output, offset, actual[: expected.size]), expected
                    position = offset + expected.size
        except ConversionError as error:
            findings.differences.append((Difference(check.name, f"the source gives no value here: {error}"), 1))
    output.expect(position, check.end)
    for offset in range(position, check.end, half):
        yield offset, _read(output, offset, actual[: min(half, check.end - offset)]), None


def _read(file: Reader, offset: int, buffer: fp8.U8) -> fp8.U8:
    file.read_into(buffer.data, offset)
    return buffer


def _compare(check: SegmentCheck, offset: int, found: fp8.U8, expected: fp8.U8, findings: SegmentFindings) -> None:
    if stringzilla.Str(found.data) == stringzilla.Str(expected.data):
        return
    for start in range(0, found.size, fp8.PIECE_BYTES):
        piece, wanted = found[start : start + fp8.PIECE_BYTES], expected[start : start + fp8.PIECE_BYTES]
        if not np.array_equal(piece, wanted):
            differing = np.flatnonzero(piece != wanted)
            first = int(differing[0])
            problem = f"expected byte 0x{int(wanted[first]):02x} from the source, found 0x{int(piece[first]):02x}"
            difference = _at(check, offset + start + first, problem)
            findings.differences.append((difference, int(differing.size)))


def _at(check: SegmentCheck, offset: int, problem: str) -> Difference:
    if check.shard is None or offset < check.shard.header.data_start:
        return Difference(check.name, f"byte {offset:,}: {problem}")
    position = offset - check.shard.header.data_start
    tensor = check.shard.header.tensors[tensor_position(check.shard.header.tensors, position)]
    return _in_tensor(check, tensor, position - tensor.start, problem)


def _in_tensor(check: SegmentCheck, tensor: TensorInfo, offset: int, problem: str) -> Difference:
    """A difference at a byte of a tensor; of one in the kernels' order, at the byte that stands there."""
    laid_out = check.laid_out.get(tensor.name)
    if laid_out is not None and offset < laid_out.bytes.nbytes:
        return Difference(check.name, problem, laid_out.name, laid_out.bytes.stored_offset(offset))
    return Difference(check.name, problem, tensor.name, offset * 8 // DTYPES[tensor.dtype].bits)


def _check_codes(check: SegmentCheck, offset: int, found: fp8.U8, findings: SegmentFindings) -> None:
    if check.shard is None:
        return
    for tensor, codes, first in _fp8_parts(check.shard, check.fp8, offset, found):
        if not fp8.has_high_codes(codes):
            continue
        counts = fp8.count_codes(codes)
        if counts.nan:
            name = check.laid_out[tensor.name].name if tensor.name in check.laid_out else tensor.name
            findings.nan_codes[name] = findings.nan_codes.get(name, 0) + counts.nan
        if counts.above_240:
            index = int(np.flatnonzero(np.isin(codes, fp8.ABOVE_240_CODES))[0])
            problem = f"the code 0x{int(codes[index]):02x} lies above 240: the hardware reads it as infinity or NaN"
            findings.differences.append((_in_tensor(check, tensor, first + index, problem), counts.above_240))


def _fp8_parts(
    shard: Shard, names: frozenset[str], offset: int, found: fp8.U8
) -> Iterator[tuple[TensorInfo, fp8.U8, int]]:
    """The e4m3 tensors in a chunk: tensor, codes, index of the first code in its tensor."""
    low = offset - shard.header.data_start
    high = low + found.size
    for position in range(max(0, tensor_position(shard.header.tensors, max(low, 0))), len(shard.header.tensors)):
        tensor = shard.header.tensors[position]
        if tensor.start >= high:
            return
        begin, end = max(tensor.start, low), min(tensor.end, high)
        if begin < end and tensor.name in names:
            yield tensor, found[begin - low : end - low], begin - tensor.start

"""Computes any byte range of an output file from its source file; the only place that changes tensor bytes.

A range may begin and end anywhere, also inside a multi-byte scale or a band of a weight that is put into another order:
the source is then read to the ends of these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError
from deepinfer_prep.files.container import TensorInfo, tensor_position
from deepinfer_prep.files.segments import SLACK_BYTES
from deepinfer_prep.files.storage import DIRECT_BYTES, Reader
from deepinfer_prep.planning.plan import Operation, OutputFile, Run
from deepinfer_prep.quantized import DTYPES
from deepinfer_prep.writing.band_writer import BandWriter


@dataclass(slots=True)
class Tally:
    """Counts of the noteworthy fp8 codes in the source that halving read, and of NaN codes by tensor."""

    counts: fp8.CodeCounts = field(default_factory=fp8.CodeCounts)
    nan_codes: dict[str, int] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add the counts of another range."""
        self.counts += other.counts
        for name, count in other.nan_codes.items():
            self.nan_codes[name] = self.nan_codes.get(name, 0) + count


def output_chunks(
    file: OutputFile, source: Reader, start: int, end: int, buffer: fp8.U8, tally: Tally | None
) -> Iterator[tuple[int, fp8.U8]]:
    """Yield (offset, bytes) pieces that tile start..end of the output file; count into `tally` if there is one.

    Each piece is valid until the next one is asked for. All but the last are multiples of `DIRECT_BYTES` long,
    or of 8 bytes in a buffer smaller than that.

    Raises:
        ConversionError: a scale has no finite double.
        PrepError, OSError: the source cannot be read.
    """
    room = buffer.size - DIRECT_BYTES - SLACK_BYTES
    step = room // DIRECT_BYTES * DIRECT_BYTES or room // 8 * 8
    first, last = max(0, start - len(file.header)), max(0, end - len(file.header))
    low, high = _widened(file, first, last)
    source.expect(file.source_start + low, file.source_start + high)

    def look(begin: int, codes: fp8.U8) -> None:
        if tally is not None:
            _count(file, begin, codes, tally)

    writer = BandWriter(file, source, look, (first, last))
    for position in range(start, end, step):
        yield position, _fill(file, source, position, min(position + step, end), buffer, writer, tally)


def tensor_at(file: OutputFile, offset: int) -> TensorInfo:
    """The tensor that holds a byte of the data section."""
    return file.tensors[tensor_position(file.tensors, offset)]


def describe_element(file: OutputFile, offset: int) -> str:
    """File, tensor and element index of a byte of the data section, for messages."""
    tensor = tensor_at(file, offset)
    element = (offset - tensor.start) * 8 // DTYPES[tensor.dtype].bits
    return f"{file.source}: tensor {tensor.name!r}: element {element:,}"


def _widened(file: OutputFile, start: int, end: int) -> tuple[int, int]:
    """A range of the data section, widened to whole elements and bands."""
    if start >= end:
        return start, end
    return _run_at(file, start).unit_at(start)[0], _run_at(file, end - 1).unit_at(end - 1)[1]


def _run_at(file: OutputFile, offset: int) -> Run:
    return file.runs[_run_position(file, offset)]


def _run_position(file: OutputFile, offset: int) -> int:
    return bisect_right(file.runs, offset, key=lambda run: run.start) - 1


def _fill(
    file: OutputFile, source: Reader, start: int, end: int, buffer: fp8.U8, writer: BandWriter, tally: Tally | None
) -> fp8.U8:
    """Bytes start..end of the output file, put together at byte `DIRECT_BYTES` of the buffer."""
    header = np.frombuffer(file.header, dtype=np.uint8)[start:end]
    buffer[DIRECT_BYTES : DIRECT_BYTES + header.size] = header
    data_start, data_end = start + header.size - len(file.header), end - len(file.header)
    room = buffer[DIRECT_BYTES - SLACK_BYTES + header.size :]
    for begin, stop, run in _stretches(file, data_start, data_end):
        at = room[begin - data_start :]
        if run.banded is None:
            _transform(file, source, begin, stop, at, tally)
        else:
            writer.copy_into(run, run.banded, begin, at[SLACK_BYTES : SLACK_BYTES + stop - begin])
    return buffer[DIRECT_BYTES : DIRECT_BYTES + end - start]


def _stretches(file: OutputFile, start: int, end: int) -> Iterator[tuple[int, int, Run]]:
    """Cut a range of the data section into parts of one laid-out weight each, and of no such weight between them.

    Each part comes with the last of its runs.
    """
    position = _run_position(file, start)
    while start < end:
        run = file.runs[position]
        while run.banded is None and run.end < end and file.runs[position + 1].banded is None:
            position += 1
            run = file.runs[position]
        yield start, min(run.end, end), run
        start, position = run.end, position + 1


def _transform(file: OutputFile, source: Reader, start: int, end: int, buffer: fp8.U8, tally: Tally | None) -> None:
    """Compute bytes start..end of the data section, none of a laid-out weight, at byte `SLACK_BYTES` of the buffer."""
    low, high = _widened(file, start, end)
    chunk = buffer[SLACK_BYTES - (start - low) :][: high - low]
    source.read_into(chunk.data, file.source_start + low)
    for position in range(_run_position(file, start), len(file.runs)):
        run = file.runs[position]
        if run.start >= high:
            break
        begin = max(run.start, low)
        _apply(file, run, begin, chunk[begin - low : min(run.end, high) - low], tally)


def _apply(file: OutputFile, run: Run, begin: int, piece: fp8.U8, tally: Tally | None) -> None:
    if run.operation is Operation.COPY:
        return
    if run.operation is Operation.HALVE:
        if tally is not None:
            _count(file, begin, piece, tally)
        fp8.halve(piece, piece)
        return
    if run.operation is Operation.COPY_CHECKED:
        _check_unscaled(file, begin, piece, tally)
        return
    try:
        fp8.double(piece, run.dtype, piece)
    except fp8.NoExactResultError as error:
        offset = begin + error.index * run.element_bytes
        raise ConversionError(
            f"{describe_element(file, offset)} {error.problem}: the scale cannot be doubled exactly. "
            "A scale like this is damaged or was never set; fetch the file again or repair the checkpoint.",
            code="bad-value",
        ) from None


def _check_unscaled(file: OutputFile, begin: int, piece: fp8.U8, tally: Tally | None) -> None:
    """Count NaN codes, which mean the same on the hardware, and stop at the first code that does not."""
    if not fp8.has_high_codes(piece):
        return
    above = np.flatnonzero(np.isin(piece, fp8.ABOVE_240_CODES))
    if above.size:
        code = int(piece[above[0]])
        raise ConversionError(
            f"{describe_element(file, begin + int(above[0]))} is the fp8 code 0x{code:02x} "
            f"({fp8.decode_e4m3fn(code):g}), which the hardware reads as infinity or NaN, and the tensor has no scale "
            "that could be doubled for it: it cannot be copied as it is. Use a checkpoint that has the scale, or this "
            "tensor in bf16.",
            code="bad-value",
        )
    if tally is not None:
        _count_nan(file, begin, piece, tally)


def _count(file: OutputFile, begin: int, piece: fp8.U8, tally: Tally) -> None:
    counts = fp8.count_codes(piece)
    tally.counts += fp8.CodeCounts(counts.rounded, 0, counts.above_240)
    if counts.nan:
        _count_nan(file, begin, piece, tally)


def _count_nan(file: OutputFile, begin: int, piece: fp8.U8, tally: Tally) -> None:
    """Count NaN codes, in all and by tensor."""
    position = begin
    while position < begin + piece.size:
        tensor = tensor_at(file, position)
        upto = min(tensor.end, begin + piece.size)
        nan = fp8.count_codes(piece[position - begin : upto - begin]).nan
        tally.counts += fp8.CodeCounts(nan=nan)
        if nan:
            tally.nan_codes[tensor.name] = tally.nan_codes.get(tensor.name, 0) + nan
        position = upto

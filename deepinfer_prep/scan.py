"""Reads tensor data without writing: the check of all scales before a conversion, and the count of codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError, RefusedError
from deepinfer_prep.parallel import SEGMENT_BYTES, run_parallel
from deepinfer_prep.plan import Operation, OutputFile, Plan
from deepinfer_prep.progress import Meter, ProgressCallback
from deepinfer_prep.storage import RangeReader
from deepinfer_prep.transform import Tally, describe_element, output_chunks


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes start..end of a file's data section, from the first byte of an element."""

    file: OutputFile
    start: int
    end: int
    is_split: bool = False

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def check_values(plan: Plan, workers: int, chunk_size: int, progress: ProgressCallback | None = None) -> None:
    """Read every scale that will be doubled and every matrix that will be split.

    Raises:
        RefusedError: values stand in the way; file, tensor and element are named. Nothing was written.
    """
    pieces = [*_run_pieces(plan, _is_doubling), *_split_pieces(plan)]
    meter = Meter(progress, "check scales", sum(piece.nbytes for piece in pieces))
    problems = []
    for piece, problem in run_parallel(pieces, _check_piece, workers, chunk_size):
        meter.add(piece.nbytes)
        if problem:
            problems.append(problem)
    if problems:
        raise RefusedError(tuple(sorted(problems)[:20]))


def scan_codes(plan: Plan, workers: int, chunk_size: int, progress: ProgressCallback | None = None) -> Tally:
    """Read every fp8 weight and count its noteworthy codes."""
    pieces = list(_run_pieces(plan, lambda operation: operation is Operation.HALVE))
    meter = Meter(progress, "scan weights", sum(piece.nbytes for piece in pieces))
    total = Tally()
    for piece, tally in run_parallel(pieces, _count_piece, workers, chunk_size):
        meter.add(piece.nbytes)
        total.add(tally)
    return total


def _is_doubling(operation: Operation) -> bool:
    return operation not in (Operation.COPY, Operation.HALVE)


def _run_pieces(plan: Plan, wanted: Callable[[Operation], bool]) -> Iterator[_Piece]:
    for file in plan.files:
        for run in file.runs:
            if wanted(run.operation):
                for start in range(run.start, run.end, SEGMENT_BYTES):
                    yield _Piece(file, start, min(start + SEGMENT_BYTES, run.end))


def _split_pieces(plan: Plan) -> Iterator[_Piece]:
    for name in plan.split:
        file = plan.files[plan.checkpoint.shard_of[name]]
        tensor = plan.checkpoint.tensors[name]
        yield _Piece(file, tensor.start, tensor.end, is_split=True)


def _chunks(piece: _Piece, buffer: fp8.U8, tally: Tally) -> Iterator[tuple[int, fp8.U8]]:
    header = len(piece.file.header)
    with RangeReader(piece.file.source) as source:
        for offset, chunk in output_chunks(piece.file, source, header + piece.start, header + piece.end, buffer, tally):
            yield offset - header, chunk


def _check_piece(piece: _Piece, buffer: fp8.U8) -> tuple[_Piece, str]:
    try:
        for offset, chunk in _chunks(piece, buffer, Tally()):
            if piece.is_split:
                _check_split(piece.file, offset, chunk)
    except ConversionError as error:
        return piece, str(error)
    return piece, ""


def _check_split(file: OutputFile, offset: int, chunk: fp8.U8) -> None:
    try:
        fp8.split_hi_lo(chunk.view("<f4"))
    except fp8.NoExactResultError as error:
        raise ConversionError(
            f"{describe_element(file, offset + 4 * error.index)} {error.problem}: the matrix cannot be split into "
            "bf16 halves. The file is damaged; fetch it again."
        ) from None


def _count_piece(piece: _Piece, buffer: fp8.U8) -> tuple[_Piece, Tally]:
    tally = Tally()
    for _ in _chunks(piece, buffer, tally):
        pass
    return piece, tally

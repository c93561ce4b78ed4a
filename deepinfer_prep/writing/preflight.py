"""Checks of tensor data before a conversion: scales that cannot be doubled, and counts of fp8 codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError, Reason, RefusedError
from deepinfer_prep.files import segments
from deepinfer_prep.files.read_ahead import near
from deepinfer_prep.files.sizes import format_size
from deepinfer_prep.files.storage import Readers
from deepinfer_prep.planning.plan import Operation, OutputFile, Plan
from deepinfer_prep.workers import DEFAULT_CHUNK_BYTES, Meter, ProgressCallback, batches, default_workers, run_parallel
from deepinfer_prep.writing.output_bytes import Tally, describe_element, output_chunks
from deepinfer_prep.writing.scale_values import ScaleJudge, find_nonzero
from deepinfer_prep.writing.weight_sizes import sample_sizes

WEIGHTS = frozenset({Operation.HALVE})
ALL_FP8 = frozenset({Operation.HALVE, Operation.COPY_CHECKED})

_MOST_PROBLEMS = 20
_BATCH_PIECES = 256
_MOST_BYTES_UNASKED = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes start..end of a file's data section, from the first byte of an element; `tensor` where it is of one."""

    file: OutputFile
    start: int
    end: int
    tensor: str = ""
    is_split: bool = False
    judge: ScaleJudge | None = None
    """For scales: what looks at their values."""
    dtype: str = ""

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def check_values(
    plan: Plan, workers: int, chunk_size: int, progress: ProgressCallback | None = None
) -> tuple[str, ...]:
    """Read every scale that will be doubled, every matrix that will be split and every fp8 tensor without a scale.

    Returns:
        What is to be told of the values although nothing stands in the way.

    Raises:
        RefusedError: values stand in the way; file, tensor and element are named. Nothing was written.
    """
    judge = ScaleJudge(plan)
    problems = find_problems(plan, workers, chunk_size, progress, judge)
    if problems:
        raise RefusedError(*problems)
    return judge.warnings


def find_problems(
    plan: Plan,
    workers: int,
    chunk_size: int,
    progress: ProgressCallback | None = None,
    judge: ScaleJudge | None = None,
) -> tuple[Reason, ...]:
    """The values for which `check_values` refuses, each a whole sentence.

    Fp8 tensors without a scale count only where the options ask to copy them; else headers refuse them already.

    Args:
        judge: looks at the values of scales, and keeps what is to be told of them.
    """
    judge = judge or ScaleJudge(plan)
    scales = _run_pieces(plan, frozenset({Operation.DOUBLE}), judge)
    pieces = [*scales, *_split_pieces(plan)]
    problems = [problem for _, problem in _check(pieces, workers, chunk_size, progress)]
    problems += judge.conclude(sample_sizes(plan, judge.unusual))
    problems += find_nonzero(plan)
    if plan.options.unscaled == "copy-if-safe":
        problems += find_unsafe(plan, workers, chunk_size, progress).values()
    return tuple(Reason(problem, "bad-value") for problem in sorted(problems)[:_MOST_PROBLEMS])


def find_unsafe(
    plan: Plan, workers: int, chunk_size: int, progress: ProgressCallback | None = None
) -> Mapping[str, str]:
    """The fp8 tensors without a scale that cannot be copied as they are: name -> the first code that forbids it."""
    found = [*_check(_unscaled_pieces(plan), workers, chunk_size, progress)]
    found.sort(key=lambda item: item[0].start, reverse=True)
    return {piece.tensor: problem for piece, problem in found}


def explain_unscaled(plan: Plan) -> tuple[Reason, ...]:
    """What the bytes of fp8 tensors without a scale say about copying them; read only where they are few."""
    size = sum(plan.checkpoint.tensors[name].nbytes for name in plan.unscaled)
    if all(reason.code != "fp8-without-scale" for reason in plan.refusals) or size > _MOST_BYTES_UNASKED:
        return ()
    unsafe = find_unsafe(plan, default_workers(), DEFAULT_CHUNK_BYTES)
    return (Reason(unscaled_sentence(len(plan.unscaled), size, unsafe), "fp8-without-scale"),)


def unscaled_sentence(count: int, size: int, unsafe: Mapping[str, str]) -> str:
    """What `find_unsafe` found, as a sentence."""
    of = f"Of the fp8 tensors without a scale ({count:,}, {format_size(size)})"
    if not unsafe:
        return f"{of} none holds a code above 240: --unscaled copy-if-safe copies them exactly."
    return f"{of} {len(unsafe):,} cannot be copied as they are: {next(iter(unsafe.values()))}"


def scan_codes(
    plan: Plan,
    workers: int,
    chunk_size: int,
    progress: ProgressCallback | None = None,
    operations: frozenset[Operation] = WEIGHTS,
) -> Tally:
    """Read every fp8 weight and count its noteworthy codes.

    Raises:
        ConversionError: with `ALL_FP8`, a tensor without a scale cannot be copied as it is.
    """
    pieces = list(_run_pieces(plan, operations))
    meter = Meter(progress, "scan weights", sum(piece.nbytes for piece in pieces))
    total = Tally()
    for size, tally in run_parallel(_batches(pieces), _count, workers, chunk_size):
        meter.add(size)
        total.add(tally)
    return total


def _run_pieces(plan: Plan, wanted: frozenset[Operation], judge: ScaleJudge | None = None) -> Iterator[_Piece]:
    for file in plan.files:
        for run in file.runs:
            if run.operation in wanted:
                for start in range(run.start, run.end, segments.SEGMENT_BYTES):
                    end = min(start + segments.SEGMENT_BYTES, run.end)
                    yield _Piece(file, start, end, judge=judge, dtype=run.dtype)


def _split_pieces(plan: Plan) -> Iterator[_Piece]:
    for name in plan.split:
        file = plan.files[plan.checkpoint.shard_of[name]]
        tensor = plan.checkpoint.tensors[name]
        yield _Piece(file, tensor.start, tensor.end, name, is_split=True)


def _unscaled_pieces(plan: Plan) -> Iterator[_Piece]:
    for name in plan.unscaled:
        file = plan.files[plan.checkpoint.shard_of[name]]
        tensor = plan.checkpoint.tensors[name]
        for start in range(tensor.start, tensor.end, segments.SEGMENT_BYTES):
            yield _Piece(file, start, min(start + segments.SEGMENT_BYTES, tensor.end), name)


def _check(
    pieces: Iterable[_Piece], workers: int, chunk_size: int, progress: ProgressCallback | None
) -> Iterator[tuple[_Piece, str]]:
    """The pieces with a problem."""
    pieces = list(pieces)
    meter = Meter(progress, "check values", sum(piece.nbytes for piece in pieces))
    for size, problems in run_parallel(_batches(pieces), _check_batch, workers, chunk_size):
        meter.add(size)
        yield from problems


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    return batches(pieces, lambda piece: piece.nbytes, segments.SEGMENT_BYTES, _BATCH_PIECES)


def _chunks(piece: _Piece, readers: Readers, buffer: fp8.U8, tally: Tally) -> Iterator[tuple[int, fp8.U8]]:
    header, source = len(piece.file.header), readers.get(piece.file.source)
    for offset, chunk in output_chunks(piece.file, source, header + piece.start, header + piece.end, buffer, tally):
        yield offset - header, chunk


def _check_batch(batch: list[_Piece], buffer: fp8.U8) -> tuple[int, list[tuple[_Piece, str]]]:
    with closing(Readers()) as readers:
        found = []
        for run in near(batch, _extent):
            _, start, _ = _extent(run[0])
            readers.get(run[0].file.source).expect(start, _extent(run[-1])[2])
            found += [(piece, _problem(piece, readers, buffer)) for piece in run]
    return sum(piece.nbytes for piece in batch), [(piece, problem) for piece, problem in found if problem]


def _extent(piece: _Piece) -> tuple[str, int, int]:
    """The bytes of the source."""
    start = piece.file.source_start
    return piece.file.name, start + piece.start, start + piece.end


def _problem(piece: _Piece, readers: Readers, buffer: fp8.U8) -> str:
    try:
        for offset, chunk in _chunks(piece, readers, buffer, Tally()):
            if piece.is_split:
                _check_split(piece.file, offset, chunk)
            elif piece.judge is not None:
                piece.judge.look(piece.file, offset, chunk, piece.dtype)
    except ConversionError as error:
        return str(error)
    return ""


def _check_split(file: OutputFile, offset: int, chunk: fp8.U8) -> None:
    try:
        fp8.split_hi_lo(chunk.view("<f4"))
    except fp8.NoExactResultError as error:
        raise ConversionError(
            f"{describe_element(file, offset + 4 * error.index)} {error.problem}: the matrix cannot be split into "
            "bf16 halves. The file is damaged; fetch it again.",
            code="bad-value",
        ) from None


def _count(batch: list[_Piece], buffer: fp8.U8) -> tuple[int, Tally]:
    tally = Tally()
    with closing(Readers()) as readers:
        for piece in batch:
            for _ in _chunks(piece, readers, buffer, tally):
                pass
    return sum(piece.nbytes for piece in batch), tally

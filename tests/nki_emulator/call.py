"""The checks that all instructions share, and the entry each leaves in the record."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

import numpy as np

from . import geometry, hardware, rules
from .context import current, location, refuse
from .dtypes import DType
from .errors import Rule
from .memory import BOTH, HOST, MATMUL, OTHER, PROGRAM, SHARED, UNWRITTEN, Buffer, Storage
from .numeric import F32, Array, read_f32, to_dtype
from .record import Instruction, Operand
from .tensor import Tensor, whole


class Engine(Enum):
    """nisa.engine."""

    tensor = "tensor"
    vector = "vector"
    scalar = "scalar"
    gpsimd = "gpsimd"
    dma = "dma"
    sync = "sync"
    unknown = "unknown"


ON_CHIP = (Buffer.sbuf, Buffer.psum)
HBM = (Buffer.shared_hbm, Buffer.private_hbm)


class Call:
    """One instruction being issued: takes its operands, checks them, reads, writes, and records."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.program = current()
        self.options = self.program.options
        self._sources: list[tuple[str, Tensor]] = []
        self._destinations: list[tuple[str, Tensor]] = []
        self._rows_written: dict[str, list[Tensor]] = {}
        self._storages: list[Storage] = []
        """Every storage it uses, those of run-time offsets included."""
        self._written_twice: dict[str, Array | None] = {}
        self.dynamic = False
        """Whether an operand has a run-time offset."""
        self.skips_outside = False
        """Whether an offset outside its tensor means that nothing is moved, rather than an error."""
        self.skipped = False
        """Whether that is so here."""

    def refuse(self, rule: Rule, operand: str, found: str) -> NoReturn:
        """Raise the error of a broken rule."""
        refuse(rule, self.op, operand, found)

    # Operands

    def source(
        self, role: str, value: Any, buffers: tuple[Buffer, ...] = ON_CHIP, *, check_written: bool = True
    ) -> Tensor:
        """An input tensor: in a legal place, alive, and written."""
        tensor = self._tensor(role, value, buffers)
        if check_written:
            self._check_written(role, tensor)
        self._sources.append((role, tensor))
        return tensor

    def destination(
        self, role: str, value: Any, buffers: tuple[Buffer, ...] = ON_CHIP, *, discarded: bool = False
    ) -> Tensor:
        """An output tensor: in a legal place, alive, writable, addressing each element once unless it is discarded."""
        tensor = self._tensor(role, value, buffers)
        if tensor.storage.read_only:
            self.refuse(rules.READ_ONLY_ARGUMENT, role, f"argument of shape {tensor.storage.shape}")
        if not discarded and geometry.repeats(tensor.shape, tensor.strides):
            self.refuse(rules.BROADCAST_WRITE, role, f"shape {tensor.shape}, strides {tensor.strides}")
        self._check_psum_words(role, tensor)
        self._note_shared(role, tensor)
        self._destinations.append((role, tensor))
        return tensor

    def _note_shared(self, role: str, tensor: Tensor) -> None:
        """Remember what another program wrote here, which this one may only write again."""
        if tensor.buffer is not Buffer.shared_hbm or tensor.gather is not None:
            return
        view = tensor.byte_view()
        others = tensor.storage.marks.written_by_others(view, PROGRAM + self.program.index)
        if others is not None:
            self._written_twice[role] = tensor.raw().copy() if self.options.arithmetic else None

    def _tensor(self, role: str, value: Any, buffers: tuple[Buffer, ...]) -> Tensor:
        if not isinstance(value, Tensor):
            self.refuse(rules.OPERAND_KIND, role, f"{type(value).__name__} where a tensor is needed")
        if value.gather is not None and self.op != "dma_copy":
            self.refuse(rules.GATHER, role, f"in {self.op}")
        self.dynamic |= value.is_indirect()
        offset = value.dynamic.source if value.buffer.on_chip and value.dynamic is not None else None
        if isinstance(offset, Tensor) and offset.dtype.name != "uint32":
            self.refuse(rules.DYNAMIC_OFFSET, role, f"{offset.dtype} offset of an on-chip operand")
        self._storages += [value.storage, *value.offset_storages()]
        outside = self.skips_outside and value.starts_outside(self.op)
        self.skipped |= outside
        tensor = value.at_zero() if outside else value.resolved(self.op)
        if tensor.storage.dead:
            self.refuse(rules.DEAD_TENSOR, role, f"tensor of shape {tensor.storage.shape}")
        if tensor.buffer not in buffers:
            where = ", ".join(b.value for b in buffers)
            self.refuse(rules.BUFFER, role, f"in {tensor.buffer.value}, must be in {where}")
        return tensor

    def _check_strides(self, role: str, tensor: Tensor) -> None:
        for size, stride in zip(*geometry.merged(tensor.shape[1:], tensor.strides[1:]), strict=True):
            if size > hardware.MAX_FREE_SIZE or stride > hardware.MAX_STRIDE:
                self.refuse(rules.STRIDE_RANGE, role, f"shape {tensor.shape}, strides {tensor.strides}")

    def require_written(self, role: str, tensor: Tensor) -> None:
        """A destination of which some elements stay as they are was written before."""
        self._check_written(role, tensor)

    def _check_written(self, role: str, tensor: Tensor) -> None:
        if tensor.gather is not None:
            for row in tensor.rows(self.op):
                if row is not None:
                    self._check_written(role, row)
            return
        codes = tensor.storage.marks.read(tensor.byte_view())
        if codes[0] == UNWRITTEN:
            self.refuse(rules.UNWRITTEN_READ, role, f"elements of a {tensor.shape} {tensor.dtype} view are not written")
        mine = PROGRAM + self.program.index
        if tensor.buffer is Buffer.shared_hbm and any(code not in (mine, BOTH, HOST, SHARED) for code in codes):
            self.refuse(rules.CROSS_CORE_READ, role, f"program {self.program.index} reads what another one wrote")

    def _check_psum_words(self, role: str, tensor: Tensor) -> None:
        if tensor.buffer is not Buffer.psum or tensor.dtype.itemsize == 4:
            return
        size = tensor.dtype.itemsize
        columns = geometry.count(tensor.shape[1:]) * (tensor.strides[-1] if tensor.shape[-1] > 1 else 1)
        if columns * size % hardware.PSUM_WORD_BYTES or tensor.row_offset % hardware.PSUM_WORD_BYTES:
            self.refuse(rules.PSUM_WORD, role, f"{tensor.shape} {tensor.dtype} at byte {tensor.row_offset}")

    def check_geometry(self, *, free_dims: int = hardware.MAX_FREE_DIMS, overlap: bool = False) -> None:
        """The rules of a compute engine's access patterns, for every operand taken so far.

        `free_dims` is how many free dimensions the instruction's sources may have; `overlap` allows a destination
        inside a source.
        """
        limits = [free_dims] * len(self._sources) + [hardware.MAX_FREE_DIMS] * len(self._destinations)
        for (role, tensor), limit in zip(self._sources + self._destinations, limits, strict=True):
            self._check_strides(role, tensor)
            count, start = tensor.shape[0], tensor.partition
            step = 128 if count > 64 else 64 if count > 32 else 32
            if start % step:
                self.refuse(rules.PARTITION_START, role, f"{count} partitions starting at {start}")
            free = geometry.merged(tensor.shape[1:], tensor.strides[1:])[0]
            if len(free) > limit:
                found = f"{len(free)} free dimensions after merging: shape {tensor.shape}, strides {tensor.strides}"
                self.refuse(rules.FREE_DIMS, role, found)
            if tensor.buffer is Buffer.psum:
                elements = geometry.count(tensor.shape[1:])
                if elements > hardware.PSUM_MAX_ELEMENTS:
                    self.refuse(rules.PSUM_SIZE, role, f"{elements} elements a partition")
        if not overlap:
            self.check_overlap()

    def check_overlap(self) -> None:
        """No destination overlaps a source other than element for element."""
        for role, tensor in self._destinations:
            for other, source in self._sources:
                if _overlap(tensor, source):
                    self.refuse(rules.OVERLAP, role, f"overlaps {other} with another access pattern")

    def same_size(self, reference: Tensor, *others: tuple[str, Tensor]) -> None:
        """All operands have `reference`'s partitions and as many elements in each, in any dimensions."""
        for role, tensor in others:
            if tensor.shape[0] != reference.shape[0] or free_elements(tensor) != free_elements(reference):
                self.refuse(rules.SAME_SHAPE, role, f"shape {tensor.shape}, expected {reference.shape}")

    def per_partition(self, role: str, value: Any, data: Tensor, *, any_dtype: bool = False) -> Tensor:
        """A (partitions, 1) operand, float32 unless `any_dtype`."""
        tensor = self.source(role, value)
        if tensor.shape != (data.shape[0], 1) or (tensor.dtype.name != "float32" and not any_dtype):
            found = f"{tensor.dtype} {tensor.shape}, expected float32 {(data.shape[0], 1)}"
            self.refuse(rules.SCALAR_OPERAND, role, found)
        return tensor

    def engine(self, engine: Any, allowed: tuple[Engine, ...], default: Engine) -> Engine:
        """The engine that runs it; checks membership and that GpSimd sees neither PSUM nor fp8."""
        if not isinstance(engine, Engine):
            self.refuse(rules.ENUMS, "engine", f"{engine!r}")
        chosen = default if engine is Engine.unknown else engine
        if chosen not in allowed:
            names = ", ".join(e.value for e in allowed)
            self.refuse(rules.ENGINE, "engine", f"{chosen.value}, possible here: {names}")
        if chosen is Engine.gpsimd:
            for role, tensor in self._sources + self._destinations:
                if tensor.buffer is Buffer.psum:
                    self.refuse(rules.GPSIMD_NO_PSUM, role, "in PSUM")
                if tensor.dtype.is_fp8:
                    self.refuse(rules.GPSIMD_NO_FP8, role, f"{tensor.dtype}")
        return chosen

    def not_both_psum(self, first: tuple[str, Tensor], second: tuple[str, Tensor]) -> None:
        """At most one of two inputs lies in PSUM."""
        if first[1].buffer is second[1].buffer is Buffer.psum:
            self.refuse(rules.BOTH_PSUM, second[0], f"{first[0]} and {second[0]} are both in PSUM")

    # Values

    def f32(self, role: str, tensor: Tensor) -> F32:
        """The operand's elements as fp32."""
        return read_f32(tensor, self.options, self.op, role)

    def store(self, role: str, tensor: Tensor, values: F32) -> None:
        """fp32 results into a destination, cast as the engine casts."""
        tensor.array()[...] = to_dtype(values, tensor.dtype, self.options, self.op, role).reshape(tensor.shape)

    def move(self, role: str, dst: Tensor, source_role: str, src: Tensor) -> None:
        """src into dst, element by element in order: bits if the types agree, through fp32 otherwise."""
        if dst.dtype == src.dtype:
            bits = np.dtype(f"u{dst.dtype.itemsize}")
            dst.array().view(bits)[...] = src.array().view(bits).reshape(dst.shape)
        else:
            with np.errstate(all="ignore"):
                self.store(role, dst, self.f32(source_role, src))

    def move_rows(self, dst: Tensor, src: Tensor, *, skip: bool) -> None:
        """src into dst row by row, one of which is a gather. Rows whose index lies outside are left, if `skip`."""
        gathered = dst if dst.gather is not None else src
        if (dst.gather is not None and src.gather is not None) or dst.shape != src.shape:
            self.refuse(rules.GATHER, "src", f"{src.shape} into {dst.shape}, one of them gathered")
        rows = gathered.rows(self.op)
        inside = [p for p, row in enumerate(rows) if row is not None]
        if len(inside) < len(rows) and not skip:
            self.refuse(rules.GATHER_ROW, "indices", f"{len(rows) - len(inside)} of {len(rows)} lie outside")
        chosen = [row for row in rows if row is not None]
        others = [(src if gathered is dst else dst).row(p) for p in inside]
        to, origin = (chosen, others) if gathered is dst else (others, chosen)
        if self.options.arithmetic:
            written: dict[int, bytes] = {}
            for target, source in zip(to, origin, strict=True):
                given = source.raw().tobytes()
                if written.setdefault(target.offset, given) != given:
                    self.refuse(rules.GATHER_ROW, "dst", "a row is written twice, with other values")
            for target, source in zip(to, origin, strict=True):
                self.move("dst", target, "src", source)
        self._rows_written["dst"] = to if self.options.arithmetic or gathered is src else [whole(dst.storage)]

    # Record

    def finish(self, engine: Engine, elements: int, *, code: int = OTHER, **flags: Any) -> None:
        """Mark what was written and append the instruction to the record."""
        for role, tensor in () if self.skipped else self._destinations:
            self._mark(role, tensor, code)
        if self.dynamic:
            flags["dynamic"] = True
        for storage in self._storages:
            self.program.touch(storage)
        self.program.instructions.append(
            Instruction(
                op=self.op,
                engine=engine.value,
                program=self.program.index,
                operands=tuple(_describe(role, t) for role, t in self._destinations + self._sources),
                elements=elements,
                flags=tuple((name, str(value)) for name, value in flags.items()),
                loops=tuple(self.program.loops),
                location=location(),
            )
        )

    def _mark(self, role: str, tensor: Tensor, code: int) -> None:
        if role in self._rows_written:
            for row in self._rows_written[role]:
                self._mark("", row, code)
            return
        marks, view = tensor.storage.marks, tensor.byte_view()
        if tensor.buffer is not Buffer.shared_hbm:
            marks.write(view, code)
            return
        mine = PROGRAM + self.program.index
        others = marks.written_by_others(view, mine)
        if others is None:
            marks.write(view, mine)
            return
        before = self._written_twice.get(role)
        if self.options.arithmetic and (before is None or (tensor.raw() != before)[others].any()):
            found = f"program {self.program.index} writes other values than another one wrote"
            self.refuse(rules.DISJOINT_WRITES, role, found)
        marks.write_both(view, others, mine)


def free_elements(tensor: Tensor) -> int:
    """Elements a partition."""
    return geometry.count(tensor.shape[1:])


def same_dtype(call: Call, role: str, dtype: DType, expected: DType) -> None:
    """Two operands have one type."""
    if dtype != expected:
        call.refuse(rules.DTYPE_MATCH, role, f"{dtype}, expected {expected}")


def _describe(role: str, tensor: Tensor) -> Operand:
    chip = tensor.buffer.on_chip
    first = 1 if chip else 0
    shape, strides = tensor.shape[first:], tensor.strides[first:]
    inner = next((s for n, s in zip(reversed(shape), reversed(strides), strict=True) if n > 1), 1)
    return Operand(
        role=role,
        buffer=tensor.buffer.value,
        dtype=tensor.dtype.name,
        itemsize=tensor.dtype.itemsize,
        shape=tensor.shape,
        partitions=tensor.shape[0] if chip else 1,
        elements=geometry.count(shape),
        run_bytes=geometry.run_length(shape, strides) * tensor.dtype.itemsize,
        inner_step=inner,
        place=(tensor.storage.number, tensor.row_offset, _row_end(tensor)),
    )


def _overlap(dst: Tensor, src: Tensor) -> bool:
    """Whether two views share bytes without being the same view (in HBM: whether their extents do)."""
    if dst.storage is not src.storage:
        return False
    same = dst.dtype.itemsize == src.dtype.itemsize and dst.offset == src.offset
    if same and dst.shape == src.shape and dst.strides == src.strides:
        return False
    if dst.row_offset >= _row_end(src) or src.row_offset >= _row_end(dst):
        return False
    if not dst.buffer.on_chip:
        return True
    rows = max(dst.partition, src.partition), min(dst.partition + dst.shape[0], src.partition + src.shape[0])
    return rows[0] < rows[1] and bool(np.intersect1d(_free_bytes(dst), _free_bytes(src)).size)


def _row_end(tensor: Tensor) -> int:
    """Byte offset within a partition (in HBM: of the tensor) just behind the last element."""
    first = 1 if tensor.buffer.on_chip else 0
    last = geometry.extent(tensor.shape[first:], tensor.strides[first:])
    return tensor.row_offset + (last + 1) * tensor.dtype.itemsize


def _free_bytes(tensor: Tensor) -> Array:
    """Byte offsets within a partition that a view addresses."""
    offsets = np.arange(tensor.dtype.itemsize) + tensor.row_offset
    for size, stride in zip(tensor.shape[1:], tensor.strides[1:], strict=True):
        offsets = (offsets[:, None] + np.arange(size if stride else 1) * stride * tensor.dtype.itemsize).reshape(-1)
    return offsets


__all__ = ["HBM", "MATMUL", "ON_CHIP", "OTHER", "Call", "Engine", "free_elements", "same_dtype"]

"""Tensors: access patterns over a storage, and the view methods of NKI 0.5 and later.

Rules: aws-neuron-sdk docs, nki/get-started/nki-language-guide (indexing), nki/api/nki.language (tensor views),
nki/deep-dives/nki-aps (access patterns).
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from . import geometry, hardware, rules
from .context import current, refuse, refuse_name
from .dtypes import DType
from .geometry import Shape
from .memory import Buffer, ByteView, Storage, allocate
from .registers import VirtualRegister

_INDEX_TYPES = ("int32", "uint32")


@dataclass(frozen=True)
class DynamicSlice:
    """nl.ds(start, size): the slice start : start + size."""

    start: int
    size: int


@dataclass(frozen=True)
class DynamicOffset:
    """A run-time offset: the value of `source`, times `step` elements, below `limit`."""

    source: VirtualRegister | Tensor
    step: int
    limit: int

    def value(self, op: str) -> int:
        """What `source` holds now."""
        return self.source.value if isinstance(self.source, VirtualRegister) else _load_offset(op, self.source)


@dataclass(frozen=True)
class RowGather:
    """Run-time rows: row p of the view starts `source`[p] times `step` elements on, with indices below `limit`."""

    source: Tensor
    step: int
    limit: int


class _NoOperators:
    """Refuses what Python would do with a value that exists only at run time."""

    def _no_operator(self, *_: Any) -> NoReturn:
        refuse(rules.NO_OPERATORS, "tensor", "", "used in a Python expression")

    __bool__ = __int__ = __index__ = __float__ = __len__ = __iter__ = __contains__ = _no_operator
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_operator
    __floordiv__ = __mod__ = __pow__ = __matmul__ = __neg__ = __and__ = __or__ = __xor__ = _no_operator
    __lshift__ = __rshift__ = __invert__ = __lt__ = __le__ = __gt__ = __ge__ = __setitem__ = _no_operator


@dataclass(frozen=True, eq=False)
class Tensor(_NoOperators):
    """A view of a storage. Strides and offset count elements of `dtype`; dimension 0 on chip is the partition."""

    storage: Storage
    dtype: DType
    shape: Shape
    strides: Shape
    offset: int = 0
    dynamic: DynamicOffset | None = None
    gather: RowGather | None = None

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False if other is None else self._no_operator()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse_name(rules.NOT_MODELLED, "tensor", name)

    # What a kernel may ask while it is traced

    @property
    def buffer(self) -> Buffer:
        return self.storage.buffer

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def get_pattern(self) -> list[list[int]]:
        """[stride, count] of every dimension."""
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    def is_contiguous(self) -> bool:
        """Whether the elements (of each partition, on chip) lie in one run."""
        first = 1 if self.buffer.on_chip else 0
        return geometry.run_length(self.shape[first:], self.strides[first:]) == geometry.count(self.shape[first:])

    def is_indirect(self) -> bool:
        return self.dynamic is not None or self.gather is not None

    # Views

    def _refuse(self, method: str, found: str) -> NoReturn:
        refuse(rules.VIEW, f"tensor.{method}", "", found)

    def _view(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> Tensor:
        if len(shape) > hardware.MAX_VIEW_RANK:
            refuse(rules.VIEW_RANK, "tensor", "", f"{len(shape)} dimensions: {tuple(shape)}")
        return replace(
            self, shape=tuple(shape), strides=tuple(strides), offset=self.offset if offset is None else offset
        )

    def _free_dim(self, method: str, dim: int, extra: int = 0) -> int:
        """`dim` as a non-negative number; the partition dimension is refused."""
        found = dim + self.ndim + extra if dim < 0 else dim
        if not 0 <= found < self.ndim + extra:
            self._refuse(method, f"no dimension {dim} in shape {self.shape}")
        if found == 0 and self.buffer.on_chip:
            refuse(rules.PARTITION_STEP, f"tensor.{method}", "", "dimension 0 is the partition")
        return found

    def __getitem__(self, key: Any) -> Tensor:
        keys = self._expand_key(key)
        shape: list[int] = []
        strides: list[int] = []
        offset, dropped = self.offset, 0
        for axis, item in enumerate(keys):
            start, size, step, drop = self._bounds(axis, item)
            offset += start * self.strides[axis]
            if drop and not (axis == 0 and self.buffer.on_chip):
                dropped += 1
                continue
            shape.append(size)
            strides.append(self.strides[axis] * step)
        if len(shape) < (2 if self.buffer.on_chip else 1):
            shape.append(1)
            strides.append(1)
        return self._view(shape, strides, offset)

    def _expand_key(self, key: Any) -> list[Any]:
        keys = list(key) if isinstance(key, tuple) else [key]
        ellipses = sum(isinstance(k, types.EllipsisType) for k in keys)
        if ellipses > 1 or len(keys) - ellipses > self.ndim:
            refuse(rules.INDEX_KIND, "tensor[...]", "", f"{len(keys)} indices for shape {self.shape}")
        missing = [slice(None)] * (self.ndim - len(keys) + ellipses)
        at = next((i for i, k in enumerate(keys) if isinstance(k, types.EllipsisType)), len(keys))
        return keys[:at] + missing + keys[at + ellipses :]

    def _bounds(self, axis: int, item: Any) -> tuple[int, int, int, bool]:
        """(start, size, step, whether the dimension is dropped) of one index."""
        dim = self.shape[axis]
        if isinstance(item, DynamicSlice):
            item = slice(item.start, item.start + item.size)
        if isinstance(item, int) and not isinstance(item, bool):
            if not -dim <= item < dim:
                refuse(rules.INDEX_RANGE, "tensor[...]", "", f"index {item} in dimension {axis} of shape {self.shape}")
            return item % dim, 1, 1, True
        if not isinstance(item, slice):
            hint = (
                "; a run-time index goes through .select or .ap" if isinstance(item, VirtualRegister | Tensor) else ""
            )
            refuse(rules.INDEX_KIND, "tensor[...]", "", f"index of type {type(item).__name__}{hint}")
        start, stop = (0 if item.start is None else item.start), (dim if item.stop is None else item.stop)
        step = 1 if item.step is None else item.step
        if not all(isinstance(v, int) for v in (start, stop, step)):
            refuse(rules.INDEX_KIND, "tensor[...]", "", f"slice {item}")
        start, stop = (start + dim if start < 0 else start), (stop + dim if stop < 0 else stop)
        if not 0 <= start < stop <= dim or step < 1:
            refuse(
                rules.INDEX_RANGE, "tensor[...]", "", f"{start}:{stop}:{step} in dimension {axis} of shape {self.shape}"
            )
        if axis == 0 and self.buffer.on_chip and step != 1:
            refuse(rules.PARTITION_STEP, "tensor[...]", "", f"partition step {step}")
        return start, -(-(stop - start) // step), step, False

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> Tensor:
        """Elements start, start + step, ... below end of one dimension."""
        if not 0 <= dim < self.ndim:
            self._refuse("slice", f"no dimension {dim} in shape {self.shape}")
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape; on chip the partition dimension stays."""
        wanted = tuple(shape)
        if geometry.count(wanted) != geometry.count(self.shape):
            self._refuse("reshape", f"{self.shape} has another number of elements than {wanted}")
        if self.buffer.on_chip and (len(wanted) < 2 or wanted[0] != self.shape[0]):
            refuse(rules.PARTITION_STEP, "tensor.reshape", "", f"{self.shape} to {wanted} changes the partitions")
        first = 1 if self.buffer.on_chip else 0
        strides = geometry.reshape_strides(self.shape[first:], self.strides[first:], wanted[first:])
        if strides is None:
            self._refuse("reshape", f"strides {self.strides} of {self.shape} do not allow {wanted}")
        return self._view(wanted, self.strides[:first] + strides)

    def view(self, dtype: DType) -> Tensor:
        """The same bytes as another element type: the last dimension scales by the ratio of the sizes."""
        if dtype.kind == "refused":
            refuse(rules.TRN2_ONLY, "tensor.view", "", f"element type {dtype}")
        old, new = self.dtype.itemsize, dtype.itemsize
        if old == new:
            return replace(self, dtype=dtype)
        if self.dynamic is not None:
            self._refuse("view", "not after a dynamic select")
        if self.strides[-1] != 1 and self.shape[-1] != 1:
            self._refuse("view", f"the last dimension has step {self.strides[-1]}")
        scaled = [self.shape[-1] * old, self.offset * old, *(s * old for s in self.strides[:-1])]
        if any(value % new for value in scaled):
            self._refuse(
                "view", f"shape {self.shape}, strides {self.strides}, offset {self.offset} x {old} bytes as {dtype}"
            )
        return replace(
            self,
            dtype=dtype,
            shape=(*self.shape[:-1], scaled[0] // new),
            offset=scaled[1] // new,
            strides=(*(v // new for v in scaled[2:]), 1),
        )

    reinterpret_cast = view

    def permute(self, dims: Sequence[int]) -> Tensor:
        """Dimensions in another order; on chip the partition stays first."""
        if sorted(dims) != list(range(self.ndim)):
            self._refuse("permute", f"{tuple(dims)} does not permute {self.ndim} dimensions")
        if self.buffer.on_chip and dims[0] != 0:
            refuse(rules.PARTITION_STEP, "tensor.permute", "", f"{tuple(dims)} moves the partition")
        return self._view([self.shape[d] for d in dims], [self.strides[d] for d in dims])

    def broadcast(self, dim: int, size: int) -> Tensor:
        """Repeat a dimension of size 1, with stride 0."""
        axis = self._free_dim("broadcast", dim)
        if self.shape[axis] != 1:
            self._refuse("broadcast", f"dimension {dim} of {self.shape} has not size 1")
        shape, strides = list(self.shape), list(self.strides)
        shape[axis], strides[axis] = size, 0
        return self._view(shape, strides)

    def expand_dim(self, dim: int) -> Tensor:
        """A new dimension of size 1 at `dim`."""
        axis = self._free_dim("expand_dim", dim, extra=1)
        return self._view((*self.shape[:axis], 1, *self.shape[axis:]), (*self.strides[:axis], 1, *self.strides[axis:]))

    def squeeze_dim(self, dim: int) -> Tensor:
        """Drop a dimension of size 1."""
        axis = self._free_dim("squeeze_dim", dim)
        if self.shape[axis] != 1 or (self.buffer.on_chip and self.ndim == 2):
            self._refuse("squeeze_dim", f"dimension {dim} of {self.shape}")
        return self._view(self.shape[:axis] + self.shape[axis + 1 :], self.strides[:axis] + self.strides[axis + 1 :])

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> Tensor:
        """Split one dimension; -1 stands for whatever is left."""
        axis = self._free_dim("reshape_dim", dim)
        if list(shape).count(-1) == 1:
            known = -geometry.count(tuple(shape))
            shape = [self.shape[axis] // known if size == -1 else size for size in shape]
        if geometry.count(tuple(shape)) != self.shape[axis]:
            self._refuse("reshape_dim", f"dimension {dim} of {self.shape} into {tuple(shape)}")
        split = tuple(s * self.strides[axis] for s in geometry.contiguous_strides(tuple(shape)))
        return self._view(
            (*self.shape[:axis], *shape, *self.shape[axis + 1 :]),
            (*self.strides[:axis], *split, *self.strides[axis + 1 :]),
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> Tensor:
        """Merge the dimensions start_dim..end_dim (both included)."""
        first, last = self._free_dim("flatten_dims", start_dim), self._free_dim("flatten_dims", end_dim)
        merged = geometry.count(self.shape[first : last + 1])
        strides = geometry.reshape_strides(self.shape[first : last + 1], self.strides[first : last + 1], (merged,))
        if first >= last or strides is None:
            self._refuse("flatten_dims", f"dimensions {start_dim}..{end_dim} of {self.shape}, strides {self.strides}")
        return self._view(
            (*self.shape[:first], merged, *self.shape[last + 1 :]),
            (*self.strides[:first], *strides, *self.strides[last + 1 :]),
        )

    def select(self, dim: int, index: int | VirtualRegister | Tensor) -> Tensor:
        """One index of a dimension, which is dropped. A (1, 1) int32 SBUF tile or a register is a run-time index."""
        if isinstance(index, int):
            if not 0 <= dim < self.ndim:
                self._refuse("select", f"no dimension {dim} in shape {self.shape}")
            return self[(slice(None),) * dim + (index,)]
        axis = self._free_dim("select", dim)
        chosen = self[(slice(None),) * axis + (0,)]
        return replace(chosen, dynamic=self._dynamic(index, self.strides[axis], self.shape[axis]))

    def vector_select(self, dim: int, indices: Tensor) -> Tensor:
        """One row of dimension 0 for each of the (P, 1) indices."""
        if dim != 0:
            refuse(rules.GATHER, "tensor.vector_select", "dim", f"{dim}")
        rows = replace(self, shape=(indices.shape[0], *self.shape[1:]))
        return rows._gathered("vector_select", indices, self.strides[0], self.shape[0])

    def _gathered(self, method: str, source: Any, step: int, limit: int) -> Tensor:
        good = (
            isinstance(source, Tensor)
            and source.buffer is Buffer.sbuf
            and source.dtype.name in _INDEX_TYPES
            and source.shape == (self.shape[0], 1)
        )
        if not good or self.buffer.on_chip or self.is_indirect():
            found = f"{getattr(source, 'shape', type(source).__name__)} over {self.shape} in {self.buffer.value}"
            refuse(rules.GATHER, f"tensor.{method}", "indices", found)
        return replace(self, gather=RowGather(source, step, limit))

    def _dynamic(self, source: VirtualRegister | Tensor, step: int, limit: int) -> DynamicOffset:
        if self.dynamic is not None:
            refuse(rules.DYNAMIC_OFFSET, "tensor", "", "the view has a run-time offset already")
        if isinstance(source, Tensor):
            good = source.buffer is Buffer.sbuf and source.dtype.name in _INDEX_TYPES and source.shape == (1, 1)
            if not good:
                found = f"{source.dtype} {source.shape} in {source.buffer.value}"
                refuse(rules.DYNAMIC_OFFSET, "tensor", "offset", found)
        elif not isinstance(source, VirtualRegister):
            refuse(rules.DYNAMIC_OFFSET, "tensor", "offset", f"{type(source).__name__}")
        return DynamicOffset(source, step, limit)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: VirtualRegister | Tensor | None = None,
        vector_offset: Tensor | None = None,
        indirect_dim: int = 0,
        dtype: DType | None = None,
    ) -> Tensor:
        """A raw access pattern [[stride, count], ...] over the whole tensor, wherever the view it is called on lies.

        A run-time offset counts in rows of that view where it is the whole tensor in another shape.
        """
        base = whole(self.storage)
        element = self.dtype if dtype is None else dtype
        entire = self.offset == 0 and geometry.count(self.shape) * self.dtype.itemsize == self.storage.size
        rows = self if entire and self.is_contiguous() else base
        if element.kind == "refused":
            refuse(rules.TRN2_ONLY, "tensor.ap", "", f"element type {element}")
        strides, shape = tuple(p[0] for p in pattern), tuple(p[1] for p in pattern)
        start = 0 if offset is None else offset
        self._check_pattern(shape if vector_offset is None else (1, *shape[1:]), strides, start, element)
        result = replace(base, dtype=element)._view(shape, strides, start)
        step = geometry.count(rows.shape[indirect_dim + 1 :]) * rows.dtype.itemsize // element.itemsize
        if vector_offset is not None:
            if scalar_offset is not None or indirect_dim != 0 or strides[0] != step:
                found = f"indirect_dim {indirect_dim}, first stride {strides[0]}, a row has {step} elements"
                refuse(rules.GATHER, "tensor.ap", "vector_offset", found)
            return result._gathered("ap", vector_offset, step, rows.shape[0])
        if scalar_offset is None:
            return result
        if self.buffer.on_chip and indirect_dim == 0:
            refuse(rules.DYNAMIC_OFFSET, "tensor.ap", "indirect_dim", "dimension 0 is the partition")
        return replace(result, dynamic=self._dynamic(scalar_offset, step, rows.shape[indirect_dim]))

    def _check_pattern(self, shape: Shape, strides: Shape, offset: int, element: DType) -> None:
        if not shape or any(size < 1 for size in shape) or any(step < 0 for step in strides) or offset < 0:
            self._refuse("ap", f"pattern shape {shape}, strides {strides}, offset {offset}")
        if self.storage.size % element.itemsize:
            self._refuse("ap", f"{self.storage.size} bytes as {element}")
        row = self.storage.row_bytes // element.itemsize
        free = slice(1, None) if self.buffer.on_chip else slice(None)
        if self.buffer.on_chip:
            if len(shape) < 2 or strides[0] != row:
                found = f"first stride {strides[0]}, a partition has {row} elements, pattern rank {len(shape)}"
                refuse(rules.PARTITION_STEP, "tensor.ap", "", found)
            if offset // row + shape[0] > self.storage.shape[0]:
                refuse(rules.INDEX_RANGE, "tensor.ap", "", f"partitions {offset // row} + {shape[0]}")
        if offset % row + geometry.extent(shape[free], strides[free]) >= row:
            refuse(rules.INDEX_RANGE, "tensor.ap", "", f"shape {shape}, strides {strides}, offset {offset}, size {row}")

    # What instructions need

    def offset_storages(self) -> list[Storage]:
        """The storages that hold its run-time offsets."""
        sources = [part.source for part in (self.dynamic, self.gather) if part is not None]
        return [source.storage for source in sources if isinstance(source, Tensor)]

    def starts_outside(self, op: str) -> bool:
        """Whether its run-time offset, if any, is no index of the dimension that it counts in."""
        return self.dynamic is not None and not 0 <= self.dynamic.value(op) < self.dynamic.limit

    def at_zero(self) -> Tensor:
        """This view with a run-time offset of 0."""
        return replace(self, dynamic=None)

    def resolved(self, op: str) -> Tensor:
        """This view with its run-time offset, if any, turned into a number."""
        if self.dynamic is None:
            return self
        value, step, limit = self.dynamic.value(op), self.dynamic.step, self.dynamic.limit
        if not 0 <= value < limit:
            refuse(rules.DYNAMIC_OFFSET, op, "offset", f"{value} is outside 0..{limit - 1}")
        moved = replace(self, offset=self.offset + value * step, dynamic=None)
        first = 1 if self.buffer.on_chip else 0
        reach = geometry.extent(self.shape[first:], self.strides[first:]) * self.dtype.itemsize
        if self.row_offset + value * step * self.dtype.itemsize + reach >= self.storage.row_bytes:
            refuse(rules.DYNAMIC_OFFSET, op, "offset", f"{value} reaches beyond {self.storage.shape}")
        return moved

    def rows(self, op: str) -> list[Tensor | None]:
        """The rows that a gather addresses, as views of one row each; None where the index lies outside."""
        assert self.gather is not None
        source, step, limit = self.gather.source, self.gather.step, self.gather.limit
        if 0 in source.storage.marks.read(source.byte_view()):
            refuse(rules.UNWRITTEN_READ, op, "indices", "the index tile is not written")
        known = current().options.arithmetic
        indices = [int(v) for v in source.array()[:, 0]] if known else [0] * self.shape[0]
        row = replace(self, shape=(1, *self.shape[1:]), gather=None)
        end = (self.offset + geometry.extent(row.shape, row.strides)) * self.dtype.itemsize
        if end + (max(indices, default=0) % limit) * step * self.dtype.itemsize >= self.storage.size:
            refuse(rules.GATHER_ROW, op, "indices", f"rows reach beyond {self.storage.shape}")
        return [replace(row, offset=self.offset + i * step) if 0 <= i < limit else None for i in indices]

    def row(self, index: int) -> Tensor:
        """Row `index` of dimension 0, as a view of one row."""
        return replace(self, shape=(1, *self.shape[1:]), offset=self.offset + index * self.strides[0])

    @property
    def partition(self) -> int:
        """Start partition."""
        return self.offset * self.dtype.itemsize // self.storage.row_bytes if self.buffer.on_chip else 0

    @property
    def row_offset(self) -> int:
        """Byte offset of the first element in its partition."""
        return self.offset * self.dtype.itemsize % self.storage.row_bytes

    def byte_view(self) -> ByteView:
        """The addressed bytes."""
        size = self.dtype.itemsize
        return ByteView(self.offset * size, self.shape, tuple(s * size for s in self.strides), size)

    def raw(self) -> npt.NDArray[np.uint8]:
        """The addressed bytes, with a last dimension for those of an element."""
        assert self.storage.data is not None, "a run without arithmetic has no data"
        return self.byte_view().over(self.storage.data)

    def array(self) -> npt.NDArray[Any]:
        """The addressed elements, as a NumPy view. Not in a run without arithmetic."""
        size = self.dtype.itemsize
        array: npt.NDArray[Any] = np.ndarray(
            self.shape,
            self.dtype.numpy,
            buffer=self.storage.data,
            offset=self.offset * size,
            strides=tuple(s * size for s in self.strides),
        )
        return array


def _load_offset(op: str, source: Tensor) -> int:
    if 0 in source.storage.marks.read(source.byte_view()):
        refuse(rules.UNWRITTEN_READ, op, "offset", "the offset tile is not written")
    return int(source.array()[0, 0]) if current().options.arithmetic else 0


def whole(storage: Storage) -> Tensor:
    """The tensor that addresses all of a storage."""
    return Tensor(storage, storage.dtype, storage.shape, geometry.contiguous_strides(storage.shape))


def new_tensor(shape: Any, dtype: Any, buffer: Any) -> Tensor:
    """nl.ndarray: an unwritten tensor in the running program."""
    if not isinstance(buffer, Buffer):
        refuse(rules.ENUMS, "nl.ndarray", "buffer", f"{buffer!r}")
    if not isinstance(dtype, DType):
        refuse(rules.DTYPE, "nl.ndarray", "dtype", f"{dtype!r} is not an nl type")
    if dtype.kind == "refused":
        refuse(rules.TRN2_ONLY, "nl.ndarray", "dtype", f"{dtype}")
    sizes = tuple(shape) if isinstance(shape, tuple | list) else ()
    least = 2 if buffer.on_chip else 1
    if not least <= len(sizes) <= hardware.MAX_VIEW_RANK or any(type(s) is not int or s < 1 for s in sizes):
        refuse(rules.SHAPE_ARGS, "nl.ndarray", "shape", f"{shape!r} in {buffer.value}")
    if buffer.on_chip and sizes[0] > hardware.PARTITIONS:
        refuse(rules.PARTITION_COUNT, "nl.ndarray", "shape", f"{sizes} has {sizes[0]} partitions")
    return whole(allocate(buffer, sizes, dtype))

"""What becomes of every operation that touches an fp8 value. Data only.

Operations are those that torch dispatches to: functions, methods, keyword forms and in-place forms of one
operation all end in the same few rows. An operation without a row is refused by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Kind(enum.Enum):
    """What an operation does with fp8 bytes."""

    SAME = "same"  # another name for the same bytes; nothing is left of it
    MOVE = "move"  # bytes are copied, viewed or indexed; the same operation on uint8 is right
    SPLIT = "split"  # a view in pieces; each piece becomes a view of its own
    FILL = "fill"  # a number is stored as fp8: the number is encoded, the rest is a move
    CONVERT = "convert"  # decode or encode, by the types on either side
    BITCAST = "bitcast"  # bytes are read as another type
    REDUCE = "reduce"  # decode, then the same operation in the type that the call asks for
    COMPARE = "compare"  # decode both sides, then compare: -0 equals 0, NaN nothing
    MATMUL = "matmul"  # decode, multiply, encode
    SCALED = "scaled"  # decode, scale, multiply
    ASSERT = "assert"  # a statement about a tensor, checked while compiling; nothing is left of it
    REFUSE = "refuse"  # known, and not possible


@dataclass(frozen=True)
class Row:
    """One operation.

    data: arguments whose bytes reach the result; they must have the result's type.
    cast: arguments that torch converts to the result's type.
    cast_scalar: arguments that torch converts only if they have no dimension.
    shape_only: tensor arguments of which only shape, strides and device matter.
    value: the number (or 0-dim tensor) that is stored.
    implied: the number that the operation stores without naming it, with the operation that names it.
    absolute: whether it counts elements from the start of the storage.
    require: arguments that must have exactly this value, with the reason.
    reason: why the operation is refused.
    """

    kind: Kind
    data: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    cast_scalar: tuple[str, ...] = ()
    shape_only: tuple[str, ...] = ()
    value: str | None = None
    implied: tuple[float, str] | None = None
    absolute: bool = False
    require: tuple[tuple[str, object, str], ...] = ()
    reason: str = ""


_NO_EAGER_KERNEL = (
    "torch has no fp8 kernel for it in eager mode either; move the bytes instead, on x.view(torch.uint8), "
    "or compute on x.to(torch.bfloat16)"
)
_ARITHMETIC = "arithmetic on fp8 values; convert the operands first, for instance with x.to(torch.bfloat16)"
_DYNAMIC = "the size of its result is known only at run time; use torch.where with a fixed size"
_MADE_VALUES = "it computes the values of an fp8 tensor; make it in float32 and convert with .to(...)"
_METADATA = "it changes the shape or storage of an fp8 tensor in place; use the form that returns a new tensor"
_ACCUMULATE = (("accumulate", False, "accumulate=True adds fp8 values; convert to a float type first"),)


def _rows(row: Row, names: str) -> dict[str, Row]:
    return {f"aten.{name}": row for name in names.split()}


def _merge(parts: Iterable[dict[str, Row]]) -> dict[str, Row]:
    table: dict[str, Row] = {}
    for part in parts:
        table.update(part)
    return table


_MOVE_SELF = Row(Kind.MOVE, data=("self",))

_MOVES = (
    _rows(
        Row(Kind.SPLIT),
        "split.Tensor split_with_sizes.default unbind.int unsafe_split.Tensor unsafe_split_with_sizes.default",
    ),
    _rows(Row(Kind.SAME), "detach.default"),
    _rows(
        _MOVE_SELF,
        "alias.default diagonal.default expand.default permute.default select.int slice.Tensor squeeze.default "
        "squeeze.dim squeeze.dims t.default transpose.int unfold.default unsqueeze.default view.default "
        "_unsafe_view.default _reshape_alias.default lift_fresh.default lift_fresh_copy.default",
    ),
    _rows(
        _MOVE_SELF,
        "clone.default flip.default repeat.default roll.default index_select.default _reshape_copy.default",
    ),
    _rows(_MOVE_SELF, "index.Tensor _unsafe_index.Tensor"),
    _rows(Row(Kind.MOVE, data=("weight",)), "embedding.default"),
    _rows(Row(Kind.MOVE, data=("tensors",)), "cat.default stack.default block_diag.default"),
    _rows(Row(Kind.MOVE, cast_scalar=("self", "other")), "where.self"),
    _rows(
        Row(Kind.MOVE, data=("self", "values"), require=_ACCUMULATE),
        "index_put.default index_put_.default _unsafe_index_put.default",
    ),
    _rows(Row(Kind.MOVE, data=("self",), cast=("src",)), "copy.default copy_.default"),
    _rows(
        Row(Kind.MOVE, data=("self",), cast=("src",)),
        "slice_scatter.default select_scatter.default diagonal_scatter.default",
    ),
    _rows(Row(Kind.MOVE, data=("self",), absolute=True), "as_strided.default"),
    _rows(Row(Kind.MOVE, data=("self",), cast=("src",), absolute=True), "as_strided_scatter.default"),
    _rows(
        Row(Kind.MOVE),
        "empty.memory_format empty_strided.default empty_permuted.default",
    ),
    _rows(
        Row(Kind.MOVE, shape_only=("self",)),
        "empty_like.default new_empty.default new_empty_strided.default",
    ),
)

_FILLS = (
    _rows(Row(Kind.FILL, data=("self",), value="value"), "fill.Scalar fill_.Scalar fill.Tensor fill_.Tensor"),
    _rows(Row(Kind.FILL, data=("self",), value="value"), "constant_pad_nd.default"),
    _rows(Row(Kind.FILL, value="fill_value"), "full.default"),
    _rows(Row(Kind.FILL, value="s"), "scalar_tensor.default"),
    _rows(
        Row(Kind.FILL, shape_only=("self",), value="fill_value"),
        "full_like.default new_full.default",
    ),
    _rows(Row(Kind.FILL, implied=(0.0, "aten.full.default")), "zeros.default"),
    _rows(Row(Kind.FILL, implied=(1.0, "aten.full.default")), "ones.default"),
    _rows(
        Row(Kind.FILL, shape_only=("self",), implied=(0.0, "aten.full_like.default")),
        "zeros_like.default",
    ),
    _rows(
        Row(Kind.FILL, shape_only=("self",), implied=(1.0, "aten.full_like.default")),
        "ones_like.default",
    ),
    _rows(
        Row(Kind.FILL, shape_only=("self",), implied=(0.0, "aten.new_full.default")),
        "new_zeros.default",
    ),
    _rows(
        Row(Kind.FILL, shape_only=("self",), implied=(1.0, "aten.new_full.default")),
        "new_ones.default",
    ),
    _rows(Row(Kind.FILL, data=("self",), implied=(0.0, "aten.fill_.Scalar")), "zero_.default"),
    _rows(Row(Kind.FILL, data=("self",), implied=(0.0, "aten.fill.Scalar")), "zero.default"),
)

_CONVERSIONS = (
    _rows(Row(Kind.CONVERT), "_to_copy.default"),
    {"prims.convert_element_type.default": Row(Kind.CONVERT)},
    _rows(Row(Kind.BITCAST), "view.dtype"),
)

_VALUES = (
    _rows(
        Row(Kind.REDUCE),
        "sum.default sum.dim_IntList mean.default mean.dim prod.default prod.dim_int nansum.default "
        "cumsum.default cumprod.default",
    ),
    _rows(
        Row(Kind.COMPARE),
        "eq.Tensor eq.Scalar ne.Tensor ne.Scalar isnan.default any.default any.dim any.dims all.default "
        "all.dim all.dims",
    ),
    _rows(Row(Kind.SCALED), "_scaled_mm.default _scaled_mm_v2.default"),
    _rows(Row(Kind.MATMUL), "mm.default"),
    _rows(Row(Kind.ASSERT), "_assert_tensor_metadata.default"),
)

_REFUSALS = (
    _rows(
        Row(Kind.REFUSE, reason=_NO_EAGER_KERNEL),
        "gather.default scatter.src scatter.value scatter_.src scatter_.value masked_fill.Scalar "
        "masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor masked_scatter.default "
        "masked_scatter_.default index_copy.default index_copy_.default index_fill.int_Scalar "
        "index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor take.default put.default "
        "put_.default tril.default triu.default topk.default sort.default sort.stable argmax.default "
        "argmin.default nonzero.default isinf.default isfinite.default isposinf.default isneginf.default "
        "signbit.default reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
        "replication_pad1d.default replication_pad2d.default replication_pad3d.default "
        "lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar",
    ),
    _rows(
        Row(Kind.REFUSE, reason=_ARITHMETIC),
        "abs.default abs_.default neg.default neg_.default sign.default sgn.default add.Tensor add.Scalar "
        "add_.Tensor add_.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar "
        "mul_.Tensor mul_.Scalar div.Tensor div.Scalar bmm.default addmm.default dot.default "
        "mv.default amax.default amin.default max.default max.dim min.default min.dim maximum.default "
        "minimum.default clamp.default clamp.Tensor clamp_min.default clamp_max.default scatter_add.default "
        "scatter_add_.default scatter_reduce.two index_add.default index_add_.default "
        "lerp.Scalar lerp.Tensor nan_to_num.default pow.Tensor_Scalar exp.default relu.default "
        "sigmoid.default _softmax.default _scaled_grouped_mm.default "
        "_scaled_grouped_mm_v2.default equal.default _local_scalar_dense.default",
    ),
    _rows(
        Row(Kind.REFUSE, reason=_MADE_VALUES),
        "arange.default arange.start arange.start_step linspace.default eye.default eye.m rand.default "
        "randn.default randint.default randint.low normal_.default uniform_.default bernoulli.default",
    ),
    _rows(Row(Kind.REFUSE, reason=_DYNAMIC), "masked_select.default"),
    _rows(
        Row(Kind.REFUSE, reason=_METADATA),
        "resize_.default set_.source_Tensor set_.source_Storage_storage_offset as_strided_.default t_.default "
        "transpose_.default squeeze_.default squeeze_.dim unsqueeze_.default",
    ),
)

_COLLECTIVES = {
    f"_c10d_functional.{name}.default": Row(Kind.MOVE, data=(argument,))
    for name, argument in (
        ("all_gather_into_tensor", "input"),
        ("all_to_all_single", "input"),
        ("broadcast", "input"),
        ("broadcast_", "input"),
        ("wait_tensor", "tensor"),
    )
}
"""Collectives that carry bytes; those that reduce have no row."""

OPERATIONS: dict[str, Row] = _merge((*_MOVES, *_FILLS, *_CONVERSIONS, *_VALUES, *_REFUSALS, _COLLECTIVES))
"""Rows by the name of the overload, as `str(torch.ops.aten.cat.default)` gives it."""

CONSTRUCTORS: frozenset[str] = frozenset({"torch.tensor", "torch.as_tensor", "torch.asarray"})
"""Functions that make a tensor of Python numbers without an operation that could be seen."""

ENTERED: frozenset[str] = frozenset(
    {
        "associative_scan",
        "cond",
        "hints_wrapper",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "strict_mode",
        "tag_activation_checkpoint",
        "while_loop",
        "while_loop_stack_output",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)
"""Higher-order operations that hand their operands to sub-graphs unchanged (whole or in slices)."""

KERNELS: frozenset[str] = frozenset({"nki_kernel_wrapper"})
"""Higher-order operations that launch a device kernel; the kernel declares what it takes as bytes."""

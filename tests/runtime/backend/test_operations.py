"""Every row of the table: one program for each operation, compared with eager or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer_prep.runtime.backend import operations, rewriter
from deepinfer_prep.runtime.backend.handlers import conversions
from deepinfer_prep.runtime.backend.operations import OPERATIONS, Kind
from tests.runtime.backend.harness import E8, F8, all_codes, assert_same, check, fp8, refusal, run_compiled, values

aten = torch.ops.aten
INDEX = torch.tensor([3, 1, 1])
VALUES = values(4, 8, seed=5)
MASK = torch.tensor([True, False, True, True, False, False, True, False])
F32 = torch.float32

ONE: dict[str, Callable[..., Any]] = {
    "aten.alias.default": lambda x: aten.alias.default(x),
    "aten.as_strided.default": lambda x: aten.as_strided.default(x, [3, 2], [2, 5], 1),
    "aten.detach.default": lambda x: aten.detach.default(x),
    "aten.diagonal.default": lambda x: aten.diagonal.default(x, 1),
    "aten.expand.default": lambda x: aten.expand.default(x, [2, 4, 8]),
    "aten.permute.default": lambda x: aten.permute.default(x, [1, 0]),
    "aten.select.int": lambda x: aten.select.int(x, 1, -2),
    "aten.slice.Tensor": lambda x: aten.slice.Tensor(x, 1, 1, 7, 2),
    "aten.split.Tensor": lambda x: aten.split.Tensor(x, 3, 1),
    "aten.split_with_sizes.default": lambda x: aten.split_with_sizes.default(x, [1, 7], 1),
    "aten.squeeze.default": lambda x: aten.squeeze.default(x[:1]),
    "aten.squeeze.dim": lambda x: aten.squeeze.dim(x[:1], 0),
    "aten.squeeze.dims": lambda x: aten.squeeze.dims(x[:1], [0, 1]),
    "aten.t.default": lambda x: aten.t.default(x),
    "aten.transpose.int": lambda x: aten.transpose.int(x, 0, 1),
    "aten.unbind.int": lambda x: aten.unbind.int(x, 0),
    "aten.unfold.default": lambda x: aten.unfold.default(x, 1, 3, 2),
    "aten.unsafe_split.Tensor": lambda x: aten.unsafe_split.Tensor(x, 2, 0),
    "aten.unsafe_split_with_sizes.default": lambda x: aten.unsafe_split_with_sizes.default(x, [1, 3], 0),
    "aten.unsqueeze.default": lambda x: aten.unsqueeze.default(x, 1),
    "aten.view.default": lambda x: aten.view.default(x, [2, 16]),
    "aten._unsafe_view.default": lambda x: aten._unsafe_view.default(x, [32]),
    "aten._reshape_alias.default": lambda x: aten._reshape_alias.default(x, [2, 16], [16, 1]),
    "aten.lift_fresh.default": lambda x: aten.lift_fresh.default(x),
    "aten.lift_fresh_copy.default": lambda x: aten.lift_fresh_copy.default(x),
    "aten.clone.default": lambda x: aten.clone.default(x.t(), memory_format=torch.contiguous_format),
    "aten.flip.default": lambda x: aten.flip.default(x, [0]),
    "aten.repeat.default": lambda x: aten.repeat.default(x, [2, 1]),
    "aten.roll.default": lambda x: aten.roll.default(x, [1], [0]),
    "aten.index_select.default": lambda x: aten.index_select.default(x, 1, INDEX),
    "aten.index.Tensor": lambda x: aten.index.Tensor(x, [None, INDEX]),
    "aten._unsafe_index.Tensor": lambda x: aten._unsafe_index.Tensor(x, [INDEX]),
    "aten._reshape_copy.default": lambda x: aten._reshape_copy.default(x, [16, 2]),
    "aten.embedding.default": lambda x: aten.embedding.default(x, INDEX),
    "aten.cat.default": lambda x: aten.cat.default([x, x[:1]], 0),
    "aten.stack.default": lambda x: aten.stack.default([x, x], 1),
    "aten.block_diag.default": lambda x: aten.block_diag.default([x, x]),
    "aten.where.self": lambda x: aten.where.self(x.float() > 0, x, x.flip(0)),
    "aten.index_put.default": lambda x: aten.index_put.default(x, [INDEX[:2]], x[:2]),
    "aten.index_put_.default": lambda x: aten.index_put_.default(x, [INDEX[:2]], x[:2].clone()),
    "aten._unsafe_index_put.default": lambda x: aten._unsafe_index_put.default(x, [INDEX[:2]], x[:2]),
    "aten.copy.default": lambda x: aten.copy.default(x, VALUES),
    "aten.copy_.default": lambda x: aten.copy_.default(x, VALUES[0]),
    "aten.slice_scatter.default": lambda x: aten.slice_scatter.default(x, VALUES[:1], 0, 1, 2),
    "aten.select_scatter.default": lambda x: aten.select_scatter.default(x, x[0], 0, 3),
    "aten.diagonal_scatter.default": lambda x: aten.diagonal_scatter.default(x, VALUES[0, :4]),
    "aten.as_strided_scatter.default": lambda x: aten.as_strided_scatter.default(x, x[:1], [1, 8], [8, 1], 8),
    "aten.fill.Scalar": lambda x: aten.fill.Scalar(x, 1.3),
    "aten.fill_.Scalar": lambda x: aten.fill_.Scalar(x, -3),
    "aten.fill.Tensor": lambda x: aten.fill.Tensor(x, torch.tensor(1.3)),
    "aten.fill_.Tensor": lambda x: aten.fill_.Tensor(x, torch.tensor(2.7)),
    "aten.constant_pad_nd.default": lambda x: aten.constant_pad_nd.default(x, [1, 2], 1.3),
    "aten.full.default": lambda x: aten.full.default([2, 3], 1.3, dtype=F8),
    "aten.scalar_tensor.default": lambda x: aten.scalar_tensor.default(1.3, dtype=F8),
    "aten.full_like.default": lambda x: aten.full_like.default(x, 1.3),
    "aten.new_full.default": lambda x: aten.new_full.default(x, [3], 1.3),
    "aten.zeros.default": lambda x: aten.zeros.default([2], dtype=F8),
    "aten.ones.default": lambda x: aten.ones.default([2], dtype=F8),
    "aten.zeros_like.default": lambda x: aten.zeros_like.default(x),
    "aten.ones_like.default": lambda x: aten.ones_like.default(x),
    "aten.new_zeros.default": lambda x: aten.new_zeros.default(x, [2]),
    "aten.new_ones.default": lambda x: aten.new_ones.default(x, [2]),
    "aten.zero_.default": lambda x: aten.zero_.default(x),
    "aten.zero.default": lambda x: aten.zero.default(x),
    "aten.empty.memory_format": lambda x: aten.empty.memory_format([2, 3], dtype=F8).fill_(2),
    "aten.empty_strided.default": lambda x: aten.empty_strided.default([2, 3], [3, 1], dtype=F8).fill_(2),
    "aten.empty_permuted.default": lambda x: aten.empty_permuted.default([2, 3], [1, 0], dtype=F8).fill_(2),
    "aten.empty_like.default": lambda x: aten.empty_like.default(x).fill_(2),
    "aten.new_empty.default": lambda x: aten.new_empty.default(x, [2]).fill_(2),
    "aten.new_empty_strided.default": lambda x: aten.new_empty_strided.default(x, [2, 3], [3, 1]).fill_(2),
    "aten._to_copy.default": lambda x: aten._to_copy.default(x, dtype=torch.bfloat16),
    "prims.convert_element_type.default": lambda x: torch.ops.prims.convert_element_type.default(x, F32),
    "aten.view.dtype": lambda x: aten.view.dtype(x, torch.int32),
    "aten.sum.default": lambda x: aten.sum.default(x, dtype=F32),
    "aten.sum.dim_IntList": lambda x: aten.sum.dim_IntList(x, [1], dtype=F32),
    "aten.mean.default": lambda x: aten.mean.default(x, dtype=F32),
    "aten.mean.dim": lambda x: aten.mean.dim(x, [1], dtype=F32),
    "aten.prod.default": lambda x: aten.prod.default(x[:1, :4], dtype=F32),
    "aten.prod.dim_int": lambda x: aten.prod.dim_int(x[:, :3], 1, dtype=F32),
    "aten.nansum.default": lambda x: aten.nansum.default(x, dtype=F32),
    "aten.cumsum.default": lambda x: aten.cumsum.default(x, 1, dtype=F32),
    "aten.cumprod.default": lambda x: aten.cumprod.default(x[:, :3], 1, dtype=F32),
    "aten.any.default": lambda x: aten.any.default(x),
    "aten.any.dim": lambda x: aten.any.dim(x, 1),
    "aten.any.dims": lambda x: aten.any.dims(x, [0, 1]),
    "aten.all.default": lambda x: aten.all.default(x),
    "aten.all.dim": lambda x: aten.all.dim(x, 1),
    "aten.all.dims": lambda x: aten.all.dims(x, [0, 1]),
    "aten.eq.Tensor": lambda x: aten.eq.Tensor(x, x.flip(0)),
    "aten.eq.Scalar": lambda x: aten.eq.Scalar(x, 0),
    "aten.ne.Tensor": lambda x: aten.ne.Tensor(x, x.flip(0)),
    "aten.ne.Scalar": lambda x: aten.ne.Scalar(x, 1.3),
    "aten.isnan.default": lambda x: aten.isnan.default(x),
}
"""A program on one fp8 tensor [4, 8] for every row that is neither refused nor in a test of its own."""

IN_CLASSES = {
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten.mm.default",
    "aten._assert_tensor_metadata.default",
}
"""Rows with a test class of their own below."""
COLLECTIVES = tuple(name for name in OPERATIONS if name.startswith("_c10d"))
"""These need a process group: test_input_checks has their program."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The overloads on fp8 values that the pass met."""
    names: set[str] = set()
    handle = rewriter.Rewriter._touched_operation

    def spy(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        names.add(str(func))
        return handle(self, func, args, kwargs)

    monkeypatch.setattr(rewriter.Rewriter, "_touched_operation", spy)
    return names


def test_every_row_has_a_program() -> None:
    allowed = {name for name, row in OPERATIONS.items() if row.kind is not Kind.REFUSE}
    elsewhere = {*IN_CLASSES, *COLLECTIVES}
    assert set(ONE) | elsewhere == allowed
    assert not set(ONE) & elsewhere


def batches(programs: dict[str, Callable[..., Any]], size: int = 12) -> list[list[str]]:
    """Names in groups: a compilation costs far more than what it compiles."""
    names = list(programs)
    return [names[i : i + size] for i in range(0, len(names), size)]


def check_batch(programs: dict[str, Callable[..., Any]], names: list[str]) -> None:
    """Compile some programs as one, each on a tensor of its own, and compare them one by one with eager."""

    def program(tensors: list[torch.Tensor]) -> list[Any]:
        return [programs[name](tensor) for name, tensor in zip(names, tensors, strict=True)]

    eager_args, compiled_args = ([fp8(4, 8, seed=seed) for seed in range(len(names))] for _ in range(2))
    expected, actual = program(eager_args), run_compiled(program, (compiled_args,))
    for name, *pairs in zip(names, expected, actual, eager_args, compiled_args, strict=True):
        try:
            assert_same(pairs[0], pairs[1])
            assert_same(pairs[2], pairs[3])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("names", batches(ONE), ids=lambda names: names[0])
def test_rows(names: list[str], seen: set[str]) -> None:
    check_batch(ONE, names)
    assert set(names) <= seen


@pytest.mark.parametrize("name", sorted(name for name, row in OPERATIONS.items() if row.kind is not Kind.REFUSE))
def test_row_names_an_operation(name: str) -> None:
    """Also in the torch versions that the other tests do not run on, as far as their overloads exist."""
    namespace, operation, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operation)
    arguments = {argument.name for argument in getattr(packet, overload)._schema.arguments}
    row = OPERATIONS[name]
    named = {*row.data, *row.cast, *row.cast_scalar, *row.shape_only, *(item[0] for item in row.require)}
    named |= {row.value} if row.value else set()
    assert named <= arguments


# ---------------------------------------------------------------------------------------------------------
# The same operations as people write them


def _written(floats: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    floats[0:2] = x[:2]
    return floats


FORMS: dict[str, Callable[..., Any]] = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "int": lambda x: x.int(),
    "long": lambda x: x.long(),
    "short": lambda x: x.short(),
    "char": lambda x: x.char(),
    "bool": lambda x: x.bool(),
    "cfloat": lambda x: x.cfloat(),
    "to positional": lambda x: x.to(F32),
    "to keyword": lambda x: x.to(dtype=F32),
    "to copy": lambda x: x.to(F8, copy=True),
    "to device and dtype": lambda x: x.to("cpu", F32),
    "to keyword device": lambda x: x.to(device="cpu", dtype=F32, non_blocking=True),
    "to other": lambda x: x.to(VALUES),
    "to memory format": lambda x: x.view(1, 2, 4, 4).to(F32, memory_format=torch.channels_last),
    "float memory format": lambda x: x.t().float(memory_format=torch.contiguous_format),
    "type dtype": lambda x: x.type(F32),
    "type string": lambda x: x.type("torch.FloatTensor"),
    "type_as": lambda x: x.type_as(VALUES),
    "aten.to.dtype": lambda x: aten.to.dtype(x, F32),
    "aten.to.device": lambda x: aten.to.device(x, "cpu", F32),
    "aten.to.other": lambda x: aten.to.other(x, VALUES),
    "to e5m2": lambda x: x.to(torch.float8_e5m2),
    "to e8m0": lambda x: x.to(E8),
    "sum dtype": lambda x: x.sum(dtype=F32),
    "sum dim": lambda x: x.sum(-1, dtype=torch.bfloat16),
    "mean": lambda x: torch.mean(x, 0, dtype=F32),
    "softmax": lambda x: torch.softmax(x, -1, dtype=F32),
    "view keyword": lambda x: x.view(dtype=torch.uint8),
    "view int16": lambda x: x.view(torch.int16),
    "Tensor.view": lambda x: torch.Tensor.view(x, torch.int8),
    "view there and back": lambda x: x.view(torch.uint8).view(F8).float(),
    "view e8m0": lambda x: x.view(E8).float(),
    "view e5m2": lambda x: x.view(torch.float8_e5m2).float(),
    "ones": lambda x: torch.ones(2, 3, dtype=F8),
    "ones keyword": lambda x: torch.ones(size=(2,), dtype=F8, device="cpu"),
    "zeros": lambda x: torch.zeros((2, 3), dtype=F8),
    "full": lambda x: torch.full((3,), -1.3, dtype=F8),
    "full keyword": lambda x: torch.full(size=(3,), fill_value=True, dtype=F8),
    "full_like float": lambda x: torch.full_like(x, 2.0, dtype=F32),
    "zeros_like from float": lambda x: torch.zeros_like(x.float(), dtype=F8),
    "ones_like float": lambda x: torch.ones_like(x, dtype=F32),
    "new_full": lambda x: x.new_full((2,), 3),
    "new_ones": lambda x: x.new_ones(3),
    "new_zeros float": lambda x: x.new_zeros(3, dtype=F32),
    "new_tensor": lambda x: x.new_tensor([1.3, -2.0]),
    "tensor": lambda x: torch.tensor([[1.3, -448.0], [0.0, 17]], dtype=F8),
    "tensor scalar": lambda x: torch.tensor(1.5, dtype=F8),
    "tensor e8m0": lambda x: torch.tensor([1.5, 3.0], dtype=E8),
    "as_tensor": lambda x: torch.as_tensor([1.3], dtype=F8),
    "as_tensor of booleans": lambda x: torch.as_tensor([True, False], dtype=F8),
    "as_tensor of a tensor": lambda x: torch.as_tensor(x.float() * 2, dtype=F8),
    "asarray": lambda x: torch.asarray([1.3], dtype=F8),
    "scalar_tensor": lambda x: torch.scalar_tensor(-1.3, dtype=F8),
    "empty_like": lambda x: torch.empty_like(x).copy_(x),
    "where scalar": lambda x: torch.where(x.float() > 0, x, 1.3),
    "where scalar first": lambda x: torch.where(x.float() > 0, -1.3, x),
    "where scalar tensor": lambda x: torch.where(x.float() > 0, x, torch.tensor(1.3)),
    "where method": lambda x: x.where(x.float() > 0, x.flip(0)),
    "where fp8 scalar tensor": lambda x: torch.where(x.float() > 0, x, torch.tensor(1.5, dtype=F8)),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2), value=-1.3),
    "pad zeros": lambda x: torch.nn.functional.pad(x, (1, 0, 0, 1)),
    "pad circular": lambda x: torch.nn.functional.pad(x[None], (1, 1), mode="circular"),
    "fill": lambda x: torch.fill(x, 2.0),
    "fill_ tensor": lambda x: x.fill_(torch.tensor(1.3)),
    "zero_": lambda x: x.zero_(),
    "setitem slice": lambda x: x.__setitem__(slice(0, 2), 1.3),
    "setitem int": lambda x: x.__setitem__((1, 2), -7),
    "setitem float tensor": lambda x: x.__setitem__((slice(None), slice(2, 4)), VALUES[:, :2]),
    "setitem scalar tensor": lambda x: x.__setitem__(0, torch.tensor(1.3)),
    "setitem index": lambda x: x.__setitem__(INDEX, 1.3),
    "setitem index fp8": lambda x: x.__setitem__((slice(None), INDEX[:2]), x[:, :2].clone()),
    "setitem mask": lambda x: x.__setitem__((slice(None), MASK), x[:, :4].clone()),
    "copy_": lambda x: x.copy_(VALUES * 2),
    "copy_ positional non_blocking": lambda x: x.copy_(VALUES * 2, True),
    "copy_ keyword": lambda x: x.copy_(VALUES * 2, non_blocking=True),
    "copy_ into float": lambda x: VALUES.clone().copy_(x, True),
    "setitem into float": lambda x: _written(VALUES.clone(), x),
    "copy_ from e8m0": lambda x: x.copy_(torch.tensor([2.0], dtype=E8)),
    "index_put": lambda x: torch.index_put(x, (INDEX[:2],), x[:2]),
    "index_put_": lambda x: x.index_put_((INDEX[:2],), x[:2].clone()),
    "cat": lambda x: torch.cat((x, x), dim=-1),
    "concat": lambda x: torch.concat([x, x]),
    "hstack": lambda x: torch.hstack([x, x]),
    "split": lambda x: x.split([3, 5], dim=1),
    "chunk": lambda x: torch.cat(x.chunk(3, dim=1)[::-1], 1),
    "unbind": lambda x: [row.float() for row in x.unbind(0)],
    "tensor_split": lambda x: x.tensor_split(3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "tile": lambda x: x.tile(2),
    "T": lambda x: x.T.float(),
    "mT": lambda x: x.mT.reshape(-1),
    "reshape": lambda x: x.t().reshape(-1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 4)).movedim(1, 0),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "expand_as": lambda x: x[:1].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 4, 8)),
    "getitem": lambda x: (x[1], x[None], x[..., -1], x[1:, ::2], x[[0, 2]], x[:, 3:4]),
    "index": lambda x: x[INDEX],
    "index pair": lambda x: x[INDEX, INDEX],
    "embedding": lambda x: torch.nn.functional.embedding(INDEX, x),
    "take_along view": lambda x: x.view(torch.uint8).gather(1, INDEX[None]).view(F8),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "eq": lambda x: x == x.flip(0),
    "ne itself": lambda x: x != x,
    "eq number": lambda x: x == 1.3,
    "eq zero": lambda x: x.eq(0),
    "eq float scalar tensor": lambda x: x == torch.tensor(1.3),
    "eq int scalar tensor": lambda x: x == torch.tensor(2),
    "float eq fp8 scalar": lambda x: x.float() == x[0, 0],
    "isnan": lambda x: torch.isnan(x),
    "contiguous": lambda x: x.t().contiguous(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "nested output": lambda x: {"a": [x[:1].clone(), (x.float(), None)], "b": 3},
}


@pytest.mark.parametrize("names", batches(FORMS), ids=lambda names: names[0])
def test_forms(names: list[str]) -> None:
    check_batch(FORMS, names)


def test_a_copy_is_not_taken_for_its_source() -> None:
    """By AOT, which does so for copies that name a layout or a device and no type."""

    def program(x: torch.Tensor, like: torch.Tensor) -> Any:
        copies = x.type_as(like), x.to("cpu", torch.float32, copy=True), x.to(F8, copy=True)
        x[0:] = x[:1].clone()
        return copies, x.t()

    check(program, lambda: (fp8(4, 8), values(1)))


@pytest.mark.parametrize("source", [torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.cfloat])
def test_encode_from(source: torch.dtype) -> None:
    def program(x: torch.Tensor) -> Any:
        return x.to(F8), x.to(dtype=F8), x.type(F8), x.type_as(torch.zeros(1, dtype=F8)), aten.to.dtype(x, F8)

    check(program, lambda: (values(4, 8).abs().to(source),))


@pytest.mark.parametrize("other", [torch.float8_e5m2, E8, F8])
def test_conversions_between_8_bit_types(other: torch.dtype) -> None:
    """The range of e5m2 is larger: its values beyond 448 are left out."""
    codes = all_codes(other)
    codes = codes[codes.float().abs() <= 448]
    check(lambda x: (x.to(F8), x.to(E8), x.to(torch.float8_e5m2)), lambda: (codes.clone(),))


@pytest.mark.parametrize("dtype", [F8, E8])
def test_all_codes_through_all_conversions(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> Any:
        return x.float(), x.bfloat16(), x.double(), x == x, x != 0, x.isnan(), x.bool(), x.to(dtype, copy=True)

    check(program, lambda: (all_codes(dtype),))


def test_e8m0_moves_and_fills() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.copy_(x.t())
        made = torch.full((2,), 3.0, dtype=E8), torch.zeros(2, dtype=E8), torch.ones_like(x), x.new_full((1,), 0.7)
        return torch.cat([x, x[:1]]), x.repeat_interleave(2, 0), torch.where(x.float() > 1, x, 4.0), made

    check(program, lambda: (all_codes(E8)[100:140].view(5, 8).clone(), torch.ones(8, 5).to(E8)))


def test_e5m2_passes_untouched(compiled: list[Any]) -> None:
    check(lambda x: (x.float() * 2).to(torch.float8_e5m2), lambda: (all_codes(torch.float8_e5m2)[:120],))
    types = {node.meta["val"].dtype for node in compiled[0].aot_graphs[0].graph.nodes if "val" in node.meta}
    assert types == {torch.float8_e5m2, F32}


class TestScaledProduct:
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return fp8(16, 32, seed=1), fp8(48, 32, seed=2), torch.tensor(0.5), torch.tensor([[0.25]]), values(48)

    @pytest.mark.parametrize("out", [torch.bfloat16, F32])
    def test_the_scaled_product(self, out: torch.dtype, seen: set[str]) -> None:
        check(lambda a, b, s, t, c: torch._scaled_mm(a, b.t(), s, t, out_dtype=out), self.arguments)
        assert "aten._scaled_mm.default" in seen

    def test_with_a_bias(self) -> None:
        def program(a: Any, b: Any, s: Any, t: Any, c: Any) -> Any:
            return torch._scaled_mm(a, b.t(), s, t, bias=c.bfloat16(), out_dtype=torch.bfloat16)

        check(program, self.arguments)

    def by_row(self) -> tuple[torch.Tensor, ...]:
        a, b, _, _, c = self.arguments()
        return a, b, values(16, 1, seed=3), values(1, 48, seed=4), c

    @pytest.mark.parametrize("out", [torch.bfloat16, F32])
    def test_with_scales_by_row(self, out: torch.dtype) -> None:
        check(lambda a, b, s, t, c: torch._scaled_mm(a, b.t(), s, t, out_dtype=out), self.by_row)

    @pytest.mark.parametrize("recipe", ["TensorWise", "RowWise"])
    def test_the_second_version(self, recipe: str, seen: set[str]) -> None:
        kind = getattr(torch.nn.functional.ScalingType, recipe)

        def program(a: Any, b: Any, s: Any, t: Any, c: Any) -> Any:
            return torch.nn.functional.scaled_mm(a, b.t(), s, kind, t, kind, bias=c.bfloat16())

        check(program, self.arguments if recipe == "TensorWise" else self.by_row)
        assert "aten._scaled_mm_v2.default" in seen

    def test_scales_by_block_are_refused(self) -> None:
        block = torch.nn.functional.ScalingType.BlockWise1x128
        by_block = torch.ones(128).as_strided((128, 1), (1, 128))

        def program(a: Any, b: Any, s: Any, t: Any) -> Any:
            return torch.nn.functional.scaled_mm(a, b.t(), s, block, t, block)

        error = refusal(program, fp8(128, 128), fp8(128, 128), by_block, by_block)
        assert "not by blocks" in str(error)

    def test_products_of_two_fp8_matrices(self) -> None:
        """Small whole numbers, whose sums are exact in any order, and sums that have to be rounded."""

        def program(a: Any, b: Any) -> Any:
            return a @ b.t(), torch.nn.functional.linear(a, b)

        check(program, lambda: (values(6, 64).round().clamp(-4, 4).to(F8), values(9, 64).sign().to(F8)))
        check(program, lambda: (fp8(16, 96, seed=1, scale=0.5), fp8(24, 96, seed=2, scale=0.5)))

    def test_a_product_of_fp8_matrices_has_no_negative_zero_of_a_sum(self) -> None:
        column, row = torch.tensor([[0.0], [1.0]]).to(F8), torch.tensor([[-6.0, 0.0]]).to(F8)
        check(lambda a, b: a @ b, lambda: (column.clone(), row.clone()))


class TestExportedPrograms:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(fp8(8, 16), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(F8).float() @ self.weight.to(torch.float32).t()).to(torch.bfloat16)

    def test_an_exported_program(self, seen: set[str]) -> None:
        exported = torch.export.export(self.Model(), (values(4, 16),)).module()
        check(lambda x: exported(x), lambda: (values(4, 16, seed=7),))
        assert "aten._assert_tensor_metadata.default" in seen

    def test_a_statement_that_does_not_hold(self) -> None:
        def program(x: Any) -> Any:
            aten._assert_tensor_metadata.default(x, dtype=torch.float32)
            return x.float()

        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="dtype mismatch"):
            run_compiled(program, (fp8(2, 2),))


def test_refused_rows_say_why() -> None:
    assert all(row.reason for row in OPERATIONS.values() if row.kind is Kind.REFUSE)


def test_the_table_holds_no_operation_twice() -> None:
    parts = (
        *operations._MOVES,
        *operations._FILLS,
        *operations._CONVERSIONS,
        *operations._VALUES,
        *operations._REFUSALS,
        operations._COLLECTIVES,
    )
    assert sum(len(part) for part in parts) == len(OPERATIONS)


def test_overflowing_fills_saturate() -> None:
    """By our definition of encode, on every torch."""

    def program(x: torch.Tensor) -> Any:
        x[:, 0] = 1000.0
        x[INDEX] = -1e30
        made = torch.tensor([465.0, -1e9], dtype=F8), torch.full((1,), 1e4, dtype=F8), x.new_full((1,), float("inf"))
        return made, torch.where(x.float() > 0, x, 480.0)[0, 0]

    x = fp8(4, 8)
    made, chosen = run_compiled(program, (x,))
    assert [tensor.view(torch.uint8).tolist() for tensor in made] == [[0x7E, 0xFE], [0x7E], [0x7E]]
    assert_same(chosen, torch.tensor(448.0).to(F8))
    assert x.view(torch.uint8)[0, 0] == 0x7E
    assert (x.view(torch.uint8)[1] == 0xFE).all()


def test_a_copy_between_devices_waits_unless_it_was_asked_not_to() -> None:
    source = torch.empty(2)
    assert conversions._where_to(source, {"device": "meta"}) == {"device": "meta", "non_blocking": False}
    asked = conversions._where_to(source, {"device": "meta", "non_blocking": True})
    assert asked == {"device": "meta", "non_blocking": True}
    assert conversions._where_to(source, {"device": "cpu", "non_blocking": True}) == {}

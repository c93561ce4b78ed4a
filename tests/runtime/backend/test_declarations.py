"""Custom operations and device kernels, by what they declare about fp8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_prep.runtime.backend import declarations, declare_fp8
from tests.runtime.backend.harness import F8, assert_same, check, fp8, refusal, run_compiled, values
from tests.runtime.backend.kernel_stand_in import wrap_nki
from tests.runtime.backend.stand_in import Compiled


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "_DECLARED", {})


def append(cache: Tensor, rows: Tensor, at: int) -> None:
    cache[at : at + len(rows)] = rows


@pytest.fixture
def ops() -> Iterator[Any]:
    """scale(x, w, by): floats; append_(cache, rows): writes; pair(x): fp8 bytes and floats."""
    with torch.library._scoped_library("deepinfer_ops", "DEF") as library:
        library.define("scale(Tensor x, Tensor w, *, float by=1.0) -> Tensor")
        library.define("append_(Tensor(a!) cache, Tensor rows, int at) -> ()")
        library.define("pair(Tensor x) -> (Tensor, Tensor)")
        library.define("many(Tensor[] xs) -> Tensor")
        key = "CompositeExplicitAutograd"
        library.impl("scale", lambda x, w, by=1.0: x * w.view(F8).float() * by, key)
        library.impl("append_", append, key)
        library.impl("pair", lambda x: (x.flip(0).clone(), x.view(F8).float()), key)
        library.impl("many", lambda xs: sum(x.view(F8).float().sum() for x in xs), key)
        fakes = {
            "scale": lambda x, w, by=1.0: torch.empty_like(x),
            "append_": lambda cache, rows, at: None,
            "pair": lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)),
            "many": lambda xs: xs[0].new_empty((), dtype=torch.float32),
        }
        for name, fake in fakes.items():
            torch.library.register_fake(f"deepinfer_ops::{name}", fake, lib=library)
        yield torch.ops.deepinfer_ops


class TestCustomOperations:
    def test_an_undeclared_one_is_refused(self, ops: Any) -> None:
        error = refusal(lambda x, w: ops.scale(x, w), values(4, 8), fp8(4, 8))
        assert "has not declared how" in str(error)
        assert 'declare_fp8("deepinfer_ops::scale"' in str(error)
        assert "lambda x, w: ops.scale(x, w)" in error.where

    def test_without_fp8_it_needs_no_declaration(self, ops: Any) -> None:
        def program(x: Tensor, raw: Tensor) -> Tensor:
            return ops.scale(x, raw) + raw.view(F8).float()

        check(program, lambda: (values(4, 8), fp8(4, 8).view(torch.uint8)))

    @pytest.mark.parametrize("by_name", [True, False])
    def test_a_declared_argument_is_passed_as_bytes(self, by_name: bool, ops: Any) -> None:
        declare_fp8("deepinfer_ops::scale" if by_name else ops.scale.default, args=("w",))

        def program(x: Tensor, w: Tensor) -> Any:
            return ops.scale(x, w, by=2.0), ops.scale.default(x, w=(x * 0.5).to(F8))

        check(program, lambda: (values(4, 8), fp8(4, 8)))

    def test_another_argument_is_refused(self, ops: Any) -> None:
        declare_fp8(ops.scale, args=("x",))
        error = refusal(lambda x, w: ops.scale(x, w), values(4, 8), fp8(4, 8))
        assert "argument 'w' of deepinfer_ops::scale is fp8 and not declared; declared are ['x']" in str(error)

    def test_one_that_writes_into_fp8(self, ops: Any, compiled: list[Compiled]) -> None:
        declare_fp8(ops.append_, args=("cache", "rows"))

        def program(cache: Tensor, x: Tensor) -> Tensor:
            ops.append_(cache, x.to(F8), 1)
            return cache.float()

        check(program, lambda: (fp8(4, 8), values(2, 8)), calls=2)
        assert len(compiled[0].mutated) == 1

    def test_results(self, ops: Any) -> None:
        declare_fp8(ops.pair, args=("x",), results=(0,))

        def program(x: Tensor) -> Any:
            first, second = ops.pair(x)
            return first, first.float() + second

        check(program, lambda: (fp8(4, 8),))

    def test_an_undeclared_result_is_refused(self, ops: Any) -> None:
        declare_fp8(ops.pair, args=("x",), results=(1,))
        error = refusal(lambda x: ops.pair(x), fp8(4, 8))
        assert "result 0 of deepinfer_ops::pair is torch.float8_e4m3fn in the program" in str(error)

    def test_lists_of_tensors(self, ops: Any) -> None:
        declare_fp8(ops.many, args=("xs",))
        check(lambda x: ops.many(list(x.split(1))), lambda: (fp8(4, 8),))

    def test_a_declaration_replaces_the_one_before(self, ops: Any) -> None:
        declare_fp8(ops.scale, args=("x",))
        declare_fp8(ops.scale, args=("w",))
        check(lambda x, w: ops.scale(x, w), lambda: (values(4, 8), fp8(4, 8)))

    def test_what_is_no_operation(self) -> None:
        with pytest.raises(TypeError, match="expected an operation, its name or a kernel, found 3"):
            declare_fp8(3)


@torch._dynamo.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    """Dynamo does not look into this function."""
    return (x * 2).to(F8).float()


@torch._dynamo.allow_in_graph
def opaque_refused(x: Tensor) -> Tensor:
    return torch.gather(x.to(F8), 0, torch.zeros(1, 8, dtype=torch.int64)).float()


@torch._dynamo.allow_in_graph
def opaque_without_fp8(x: Tensor) -> Tensor:
    return x * 2


class TestOpaqueFunctions:
    def test_fp8_inside_is_found(self) -> None:
        check(lambda x: opaque(x) + 1, lambda: (values(4, 8, scale=1),))

    def test_refusals_inside_name_the_function(self) -> None:
        error = refusal(lambda x: opaque_refused(x), values(4, 8))
        assert "opaque_refused (aten.gather.default)" in error.operation

    def test_others_stay_in_the_graph(self) -> None:
        targets: list[Any] = []

        def base(gm: Any, examples: list[Any]) -> Any:
            targets.extend(node.target for node in gm.graph.nodes)
            return gm.forward

        run_compiled(
            lambda x, y: opaque_without_fp8(x) + y.float(), (values(4), fp8(4)), options={"base_backend": base}
        )
        assert opaque_without_fp8 in targets


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    if weight.dtype is F8:
        raise TypeError("float8_e4m3fn is not supported in neuronxcc")
    return weight.view(F8).float() * scale


def pass_on(weight: Tensor) -> Tensor:
    return weight.clone()


class TestKernels:
    def test_one_on_bytes_needs_no_declaration(self) -> None:
        launch = wrap_nki(dequantize, "weight", "scale")

        def program(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
            return launch(w, scale) + x.float()

        arguments = fp8(4, 8).view(torch.uint8), torch.tensor(2.0), fp8(4, 8, seed=1)
        assert_same(program(*arguments), run_compiled(program, arguments))

    def test_an_undeclared_one_is_refused(self) -> None:
        launch = wrap_nki(pass_on, "weight")
        error = refusal(lambda w: launch(w).float(), fp8(4, 8))
        assert "kernel pass_on takes or returns fp8 tensors and has not declared how" in str(error)
        assert "x.view(torch.uint8)" in str(error)

    def test_a_declared_one_gets_bytes(self) -> None:
        launch = wrap_nki(pass_on, "weight")
        declare_fp8(pass_on, args=("weight",), results=(0,))

        def program(w: Tensor) -> Any:
            moved = launch((w.float() * 2).to(F8))
            return moved, moved.float() + 1

        w = fp8(4, 8, scale=1)
        expected = (w.float() * 2).to(F8)
        assert_same((expected, expected.float() + 1), run_compiled(program, (w,)))

    def test_an_undeclared_result_is_refused(self) -> None:
        launch = wrap_nki(pass_on, "weight")
        declare_fp8(pass_on, args=("weight",))
        assert "declared fp8 results are none" in str(refusal(lambda w: launch(w).float(), fp8(4, 8)))

    def test_an_undeclared_operand_is_refused(self) -> None:
        launch = wrap_nki(pass_on, "weight")
        declare_fp8(pass_on, results=(0,))
        assert "argument 'weight'" in str(refusal(lambda w: launch(w).float(), fp8(4, 8)))

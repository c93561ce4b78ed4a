"""What a pass that replaces fp8 by bytes gets wrong most easily, a class for each kind of mistake."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deepinfer_prep.runtime.backend import declare_fp8
from deepinfer_prep.runtime.backend.codec_operations import CodecOperation
from deepinfer_prep.runtime.backend.subgraphs import graph_modules
from tests.runtime.backend.harness import (
    E8,
    F8,
    all_codes,
    assert_same,
    bits,
    check,
    fp8,
    refusal,
    run_compiled,
    values,
)
from tests.runtime.backend.stand_in import Compiled

aten = torch.ops.aten


class TestValuesThatLeaveAGraph:
    """They come back as fp8, from outputs and across graph breaks."""

    def test_across_a_graph_break(self) -> None:
        def program(x: Tensor) -> Tensor:
            part = x[1:].clone()
            torch._dynamo.graph_break()
            return part.float() * 2

        check(program, lambda: (fp8(4, 8),))

    def test_across_a_print(self, capsys: pytest.CaptureFixture[str]) -> None:
        def program(x: Tensor) -> Tensor:
            part = (x.float() * 3).to(F8)
            print("hello")
            return part.float()

        check(program, lambda: (fp8(4, 8, scale=1),))
        assert capsys.readouterr().out == "hello\nhello\n"

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: (x.float() * 2).to(F8),
            lambda x: torch.cat([x, x]),
            lambda x: x[1:],
            lambda x: x.t(),
            lambda x: torch.zeros(2, dtype=F8),
            lambda x: {"a": [(x[:1] * 1 if False else x[:1], x.t())], "b": x.float()},
            lambda x: torch.empty_like(x).copy_(x),
            lambda x: x,
        ],
    )
    def test_as_an_output(self, make: Any) -> None:
        check(make, lambda: (fp8(4, 8, scale=1),))

    def test_e8m0_too(self) -> None:
        check(lambda x: (x[1:], (x.float() * 2).to(E8)), lambda: (torch.tensor([1.0, 2.0, 0.5]).to(E8),))


class TestAliasedInputs:
    def test_base_and_overlapping_views(self) -> None:
        def program(base: Tensor, left: Tensor, right: Tensor) -> Any:
            left.fill_(2.0)
            before = right.float()
            base.view(-1)[6] = -3.0
            return before, left.float(), base.float()

        def arguments() -> tuple[Tensor, ...]:
            base = fp8(16)
            return base, base[2:10], base[5:12]

        check(program, arguments, calls=2)

    def test_a_weight_and_its_uint8_view(self) -> None:
        """What prepare_model makes of every weight."""

        def program(weight: Tensor, raw: Tensor) -> Any:
            weight[0] = 1.5
            seen = raw.int()
            raw[1] = 0x40
            return seen, weight.float()

        def arguments() -> tuple[Tensor, ...]:
            weight = fp8(4, 8)
            return weight, weight.view(torch.uint8)

        check(program, arguments, calls=2)

    def test_views_with_offsets(self) -> None:
        def program(first: Tensor, second: Tensor) -> Tensor:
            first.copy_(second.float() * 0.5)
            return first.float() + second.float()

        def arguments() -> tuple[Tensor, ...]:
            base = fp8(64)
            return base[8:24].view(4, 4), base[30:46].view(4, 4)

        check(program, arguments, calls=2)

    def test_inputs_that_stop_sharing_storage(self) -> None:
        """A graph compiled for aliased inputs is not used for separate ones, nor the other way round."""

        def program(first: Tensor, second: Tensor) -> Tensor:
            first.fill_(3.0)
            return second.float()

        compiled = torch.compile(program, backend="deepinfer_neuron")
        shared = fp8(4, 4)
        assert torch.equal(compiled(shared, shared.view(4, 4)), torch.full((4, 4), 3.0))
        other = fp8(4, 4, seed=1)
        assert torch.equal(compiled(fp8(4, 4), other), other.float())
        assert torch.equal(compiled(other, other.view(4, 4)), torch.full((4, 4), 3.0))

    def test_inputs_that_come_to_share_storage(self, compiled: list[Compiled]) -> None:
        def program(first: Tensor, second: Tensor) -> Tensor:
            first.fill_(3.0)
            return second.float()

        run = torch.compile(program, backend="deepinfer_neuron")
        other = fp8(8, 4, seed=1)
        assert torch.equal(run(fp8(4, 4), other[:4].clone()), other[:4].float())
        for offset in (0, 1, 2, 1, 0):
            base, expected = other.clone(), other.clone()
            assert_same(program(expected[:4], expected[offset : offset + 4]), run(base[:4], base[offset : offset + 4]))
            assert_same(expected, base)
        assert len(compiled) == 4

    def test_storage_shared_with_a_wider_type(self) -> None:
        def program(raw: Tensor, words: Tensor) -> Tensor:
            raw.fill_(1.0)
            return words + 0

        def arguments() -> tuple[Tensor, ...]:
            raw = fp8(16)
            return raw, raw.view(torch.int32)

        check(program, arguments)


class TestSubGraphs:
    def test_cond(self) -> None:
        def program(choose: Tensor, x: Tensor) -> Tensor:
            return torch.cond(choose, lambda a: a.float() * 2, lambda a: a.float() + 1, (x,))

        for choice in (True, False):
            check(program, lambda choice=choice: (torch.tensor(choice), fp8(4, 8)))

    def test_nested_compile_region(self) -> None:
        @torch.compiler.nested_compile_region
        def region(x: Tensor) -> Tensor:
            return (x.float() * 0.5).to(F8)

        check(lambda x, y: region(x).float() + region(y).float(), lambda: (fp8(4, 8), fp8(4, 8, seed=1)))

    def test_checkpoint(self) -> None:
        def program(x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(lambda a: a.float() * 2, x, use_reentrant=False)

        check(program, lambda: (fp8(4, 8),))


class TestConversions:
    """All spellings are in test_table.py; here those that were once missed."""

    def test_they_are_seen_however_they_are_written(self) -> None:
        def program(x: Tensor, like: Tensor) -> Any:
            return (
                (x.int(), x.long(), x.short(), x.char(), x.bool(), x.cfloat()),
                (x.to(like), x.type_as(like), x.type("torch.FloatTensor")),
                (aten._to_copy.default(x, dtype=torch.float32), aten.to.dtype(x, torch.float32)),
                torch.ops.prims.convert_element_type(x, torch.float32),
                (x.sum(dtype=torch.float32), x.mean(dtype=torch.float32)),
            )

        check(program, lambda: (fp8(4, 8), torch.zeros(1)))

    def test_negative_zero_is_false(self) -> None:
        assert run_compiled(lambda x: x.bool(), (torch.tensor([-0.0, 0.0]).to(F8),)).tolist() == [False, False]


def test_view_with_a_keyword() -> None:
    check(lambda x: (x.view(dtype=F8).float(), x.view(dtype=F8)), lambda: (torch.arange(128, dtype=torch.uint8),))


def test_fill_values() -> None:
    def program(x: Tensor, mask: Tensor) -> Any:
        chosen = torch.where(mask, x, 1.5), torch.where(mask, 2.0, x)
        padded = torch.nn.functional.pad(x, (1, 1), value=2.0)
        made = x.new_tensor([1.0, 2.0]), torch.tensor([1.5, -2.0], dtype=F8), torch.tensor(1.5, dtype=F8)
        other = torch.as_tensor([2.0], dtype=F8), torch.scalar_tensor(2.0, dtype=F8), torch.fill(x, 2.0)
        return chosen, padded, made, other, x.fill_(torch.tensor(2.0))

    check(program, lambda: (fp8(4, 8), values(4, 8) > 0))


def test_comparisons() -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        return torch.isnan(x), x != x, x == 0, x == y, x == 1.0, y == x[:1]

    check(program, lambda: (all_codes(), all_codes()[torch.arange(255, -1, -1)]))
    assert "arithmetic" in str(refusal(lambda x: x.abs(), fp8(4)))
    assert "arithmetic" in str(refusal(lambda x: x * x, fp8(4, 4)))


@pytest.fixture
def quantize() -> Any:
    """A custom operation that returns fp8, and its form that returns bytes."""
    library = torch.library.Library("deepinfer_test", "DEF")
    library.define("quantize(Tensor x) -> Tensor")
    library.define("quantize_bytes(Tensor x) -> Tensor")
    for name, dtype in (("quantize", F8), ("quantize_bytes", torch.uint8)):
        library.impl(name, lambda x, dtype=dtype: (x * 2).to(F8).view(dtype), "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"deepinfer_test::{name}", lambda x, dtype=dtype: torch.empty_like(x, dtype=dtype), lib=library
        )
    yield torch.ops.deepinfer_test
    library._destroy()


def test_a_custom_operation_that_returns_fp8(quantize: Any) -> None:
    def program(x: Tensor) -> Tensor:
        return quantize.quantize(x).float() + 1

    error = refusal(program, values(4, 8, scale=1))
    assert 'declare_fp8("deepinfer_test::quantize"' in str(error)
    declare_fp8("deepinfer_test::quantize", results=(0,))
    assert "Declare the result and give a bytes_form" in str(refusal(program, values(4, 8, scale=1)))
    declare_fp8(quantize.quantize, results=(0,), bytes_form=quantize.quantize_bytes)
    torch._dynamo.reset()
    check(program, lambda: (values(4, 8, scale=1),))


class TestConversionsThatAlsoMove:
    def test_the_device_is_not_dropped(self) -> None:
        def program(x: Tensor) -> Tensor:
            return x.to("meta", torch.float32)

        result = run_compiled(program, (fp8(4, 8),), options={"base_backend": "eager"})
        assert (result.device.type, result.dtype) == ("meta", torch.float32)

    def test_the_memory_format_is_not_ignored(self) -> None:
        def program(x: Tensor) -> Any:
            return (
                x.float(memory_format=torch.channels_last),
                x.to(torch.bfloat16, memory_format=torch.channels_last),
                x.float().to(F8, memory_format=torch.channels_last),
            )

        x = fp8(2, 3, 4, 5)
        for eager, got in zip(
            program(x), run_compiled(program, (x,), options={"base_backend": "aot_eager"}), strict=True
        ):
            assert_same(eager, got)
            assert eager.stride() == got.stride()


class TestDynamicShapes:
    def test_sizes_known_only_at_run_time(self) -> None:
        def program(x: Tensor, n: Tensor) -> Tensor:
            return x[: n.item()].float()

        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            error = refusal(program, fp8(4, 8), torch.tensor(2))
        assert "known only at run time" in str(error)

    @pytest.mark.parametrize("select", [lambda x, m: x[m], lambda x, m: x.masked_select(m)])
    def test_results_of_a_size_known_only_at_run_time(self, select: Any) -> None:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            error = refusal(lambda x, m: select(x, m).float(), fp8(4, 8), values(4, 8) > 0)
        assert "known only at run time" in str(error)


def test_fp8_written_into_floats() -> None:
    def program(x: Tensor, z: Tensor) -> Any:
        y = x.float()
        y[0:2] = z
        w = x.bfloat16()
        w.copy_(z[0])
        return y, w

    check(program, lambda: (fp8(4, 8), fp8(2, 8, seed=1)))


def test_copy_with_a_positional_flag() -> None:
    check(lambda x, y: (x.copy_(y, True), x.copy_(y, non_blocking=True)), lambda: (fp8(4, 8), values(4, 8, seed=1)))


class TestWhatWasNotImplemented:
    def test_ones(self) -> None:
        check(lambda x: (torch.ones(2, dtype=F8), torch.ones_like(x), x.new_ones(3)), lambda: (fp8(4),))

    def test_negative_values(self) -> None:
        check(lambda x: (torch.tensor([-1.0, -2.5], dtype=F8), x.clone()), lambda: (fp8(4),))

    def test_scaled_mm(self) -> None:
        def program(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
            return torch._scaled_mm(a, b.t(), s, s, out_dtype=torch.bfloat16)

        check(program, lambda: (fp8(16, 32), fp8(16, 32, seed=1), torch.tensor(0.5)))

    def test_a_custom_operation_gets_what_it_declared(self) -> None:
        """tests/runtime/backend/test_declarations.py has the rest."""
        with torch.library._scoped_library("deepinfer_test13", "DEF") as library:
            library.define("total(Tensor x) -> Tensor")
            library.impl("total", lambda x: x.view(F8).float().sum(), "CompositeExplicitAutograd")
            torch.library.register_fake("deepinfer_test13::total", lambda x: x.new_empty((), dtype=torch.float32))
            declare_fp8("deepinfer_test13::total", args=("x",))
            check(lambda x: torch.ops.deepinfer_test13.total(x) * 2, lambda: (fp8(4, 8),))


def test_the_name_is_registered_once() -> None:
    """By the entry point alone; test_registration.py has the rest."""
    from torch._dynamo.backends.registry import lookup_backend

    from deepinfer_prep.runtime import backend

    found = lookup_backend("deepinfer_neuron")
    assert found is lookup_backend("deepinfer_neuron")
    assert (found.__module__, found.__qualname__) == (backend.__name__, "deepinfer_neuron")


def test_unknown_operations_are_not_taken_for_moves() -> None:
    for operation in (torch.erf, torch.special.i0, torch.Tensor.cosh):
        assert "not in the table" in str(refusal(lambda x, operation=operation: operation(x), fp8(4)))
        torch._dynamo.reset()


class TestOtherSmallTypes:
    def test_e8m0_inputs_do_not_reach_the_compiler(self, compiled: list[Compiled]) -> None:
        check(lambda scale: scale.float() * 2, lambda: (all_codes(E8)[:250],))
        assert compiled[0].calls == 1

    def test_fnuz(self) -> None:
        assert "fnuz" in str(refusal(lambda x: x.clone(), torch.zeros(4).to(torch.float8_e4m3fnuz)))


class TestGraphsWithoutFp8:
    @pytest.mark.parametrize("program", [lambda x: x.view(torch.int32) + 1, lambda x: x * 2])
    def test_they_are_handed_on_untouched(self, program: Any) -> None:
        seen: list[Any] = []

        def base(gm: Any, examples: list[Any]) -> Any:
            seen.append((gm.print_readable(print_output=False), examples))
            return gm.forward

        x = torch.randn(4)
        torch.compile(program, backend=base)(x)
        torch._dynamo.reset()
        run_compiled(program, (x,), options={"base_backend": base})
        assert seen[0][0] == seen[1][0]
        assert seen[1][1][0] is x


def test_metadata_follows() -> None:
    seen: list[Any] = []

    def base(gm: Any, examples: list[Any]) -> Any:
        for part in graph_modules(gm):
            for node in part.graph.nodes:
                seen.extend(pytree.tree_leaves((node.args, node.kwargs, node.meta.get("example_value"))))
        return gm.forward

    def program(choose: Tensor, x: Tensor) -> Any:
        y = torch.cond(choose, lambda a: a.clone(), lambda a: a.flip(0), (x,))
        return y.t(), x.split(2), torch.zeros(2, dtype=F8)

    run_compiled(program, (torch.tensor(True), fp8(4, 8)), options={"base_backend": base})
    dtypes = {leaf if isinstance(leaf, torch.dtype) else leaf.dtype for leaf in seen if hasattr(leaf, "dtype")}
    assert dtypes == {torch.uint8, torch.bool}
    assert F8 not in seen


def test_graphs_can_be_serialized() -> None:
    """Every call in the graph is of something that can be imported."""
    targets: list[Any] = []

    def base(gm: Any, examples: list[Any]) -> Any:
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    def program(x: Tensor, scale: Tensor) -> Tensor:
        return torch.cat([(x.float() * scale.float()).to(F8), x]).bfloat16()

    run_compiled(program, (fp8(4, 8), torch.ones(1).to(E8)), options={"base_backend": base})
    own = [target for target in targets if isinstance(target, CodecOperation)]
    assert len(own) == 4
    assert all(pickle.loads(pickle.dumps(target)) is target for target in own)


def test_what_always_worked() -> None:
    def program(cache: Tensor, x: Tensor, scalar: Tensor, empty: Tensor, broadcast: Tensor) -> Any:
        cache[1:3] = (x.float() * 2).to(F8)
        return cache.unfold(1, 2, 2), scalar.float(), empty.float(), broadcast.float(), cache.as_strided((2, 2), (8, 1))

    def arguments() -> tuple[Tensor, ...]:
        return fp8(4, 8), fp8(2, 8, scale=1), fp8(1)[0], fp8(0, 4), fp8(1, 4).expand(3, 4)

    check(program, arguments, calls=2)


def test_deterministic_algorithms_do_not_matter() -> None:
    def program(x: Tensor) -> Tensor:
        made = torch.empty(4, 8, dtype=F8)
        return made.copy_(x)

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(bits(run_compiled(program, (fp8(4, 8),))), bits(fp8(4, 8)))
    finally:
        torch.use_deterministic_algorithms(False)

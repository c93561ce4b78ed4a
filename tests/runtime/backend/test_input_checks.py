"""What enters and leaves the compiled graph: layouts, storage, writes, gradients, constants."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer_prep.runtime.backend.storage.layout import plan_layout
from tests.runtime.backend.harness import E8, F8, assert_same, check, fp8, refusal, run_compiled, values
from tests.runtime.backend.stand_in import Compiled

ALWAYS_INLINED = torch.__version__ >= "2.12"
"""Since then Dynamo has no graphs that hold tensors of modules themselves."""

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.view(8, 12).t(),
    "square transposed": lambda t: t[:64].view(8, 8).t(),
    "permuted": lambda t: t.view(2, 4, 12).permute(2, 0, 1),
    "channels last": lambda t: t.view(1, 2, 6, 8).permute(0, 3, 1, 2),
    "columns": lambda t: t.view(8, 12)[:, 2:7],
    "rows": lambda t: t.view(8, 12)[3:5],
    "every second": lambda t: t[::2],
    "strided and transposed": lambda t: t.view(8, 12)[::2, 1:5].t(),
    "expanded": lambda t: t[:12].expand(4, 12),
    "diagonal": lambda t: t[32:].view(8, 8).diagonal(),
    "one element": lambda t: t[5],
    "size one": lambda t: t.view(8, 12)[2:3, 4:5],
    "empty": lambda t: t[:0].view(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayouts:
    """Trainium takes contiguous tensors; the stand-in refuses all others."""

    def test_read(self, layout: str) -> None:
        view = LAYOUTS[layout]
        check(lambda x, y: (x.float(), y * 2, x), lambda: (view(fp8(96)), view(values(96))))

    def test_nothing_is_copied(self, layout: str) -> None:
        tensor = LAYOUTS[layout](fp8(96))
        (lowered,) = plan_layout([tensor], []).lowering([tensor])([tensor])
        assert lowered.is_contiguous()
        assert lowered.dtype is torch.uint8
        same = lowered.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert same == (layout != "diagonal")

    def test_written(self, layout: str) -> None:
        if layout in ("expanded", "diagonal"):
            pytest.skip("torch does not write into expanded tensors; a diagonal is refused")
        view = LAYOUTS[layout]

        def program(x: Tensor, y: Tensor) -> Any:
            x.copy_(x.float() * 0.5)
            y.add_(1)
            return x.float()

        def arguments() -> tuple[Tensor, ...]:
            base, other = fp8(96), values(96)
            return view(base), view(other), base.view(torch.int32)[:0], base, other

        check(lambda x, y, *whole: program(x, y), arguments, calls=2)


class TestWrites:
    """The device compiler is told which inputs are written to; the stand-in finds out as it does."""

    @pytest.mark.parametrize(
        "write",
        [
            lambda cache, x: cache.__setitem__(slice(1, 3), x),
            lambda cache, x: cache.__setitem__(slice(1, 3), x.float()),
            lambda cache, x: cache[1:3].copy_(x.float()),
            lambda cache, x: cache.index_put_((torch.tensor([2, 0]),), x),
            lambda cache, x: torch.ops.aten.index_put_.default(cache, [torch.tensor([2, 0])], x),
            lambda cache, x: cache.view(2, 2, 8)[0].transpose(0, 1).copy_(x.t()),
            lambda cache, x: cache.view(torch.uint8)[:2].copy_(x.view(torch.uint8)),
            lambda cache, x: cache.fill_(1.5),
            lambda cache, x: cache[0].zero_(),
        ],
    )
    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    def test_found_and_done(self, write: Any, layout: str, compiled: list[Compiled]) -> None:
        def arguments() -> tuple[Tensor, ...]:
            cache = fp8(4, 8) if layout == "contiguous" else fp8(8, 4).t()
            return fp8(2, 8, seed=1), cache

        def program(x: Tensor, cache: Tensor) -> Tensor:
            if layout == "transposed":
                cache = cache.contiguous() if write(cache.clone(), x) is ... else cache
            write(cache, x)
            return cache.float()

        if layout == "transposed" and "view" in write.__code__.co_names:
            pytest.skip("views of a transposed cache do not exist in eager either")
        check(program, arguments, calls=2)
        assert len(compiled[0].mutated) == 1

    def test_buffers_and_parameters(self) -> None:
        class Cache(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("cache", fp8(4, 8))
                self.scale = nn.Parameter(torch.tensor([2.0]).to(E8), requires_grad=False)

            def forward(self, x: Tensor, at: Tensor) -> Tensor:
                self.cache.index_put_((at,), x.to(F8))
                return self.cache.float() * self.scale.float()

        for inline in (True,) if ALWAYS_INLINED else (True, False):
            torch._dynamo.reset()
            eager, traced = Cache(), Cache()
            with contextlib.nullcontext() if inline else torch._dynamo.config.patch(inline_inbuilt_nn_modules=False):
                run = torch.compile(traced, backend="deepinfer_neuron")
                for step in range(3):
                    args = values(1, 8, seed=step), torch.tensor([step])
                    assert_same(eager(*args), run(*args))
                assert_same(eager.cache, traced.cache)

    @pytest.mark.parametrize(
        "write",
        [
            lambda x: x.unsqueeze(1).expand(-1, 3, 8).fill_(1.5),
            lambda x: x.unfold(1, 3, 1).zero_(),
            lambda x: x.view(torch.uint8)[:1].expand(4, 8).add_(1),
            lambda x: x[:1].expand(4, 8).__setitem__(0, 2.0),
        ],
    )
    def test_into_overlapping_elements_is_refused(self, write: Any) -> None:
        error = refusal(lambda x: (write(x), x.float())[1], fp8(4, 8))
        assert "elements overlap in memory" in str(error)
        assert error.operation in ("Tensor.fill_", "Tensor.zero_", "Tensor.add_", "_operator.setitem")

    def test_a_graph_that_only_writes(self) -> None:
        check(lambda cache, x: cache.copy_(x) and None, lambda: (fp8(1), values(1)))


class TestHeldTensors:
    def test_modules_that_are_not_inlined(self) -> None:
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(fp8(4, 8), requires_grad=False)
                self.flat = nn.Flatten(0)

            def forward(self, x: Tensor) -> Any:
                return self.flat(self.weight).float() + x, self.weight.t()

        if ALWAYS_INLINED:
            pytest.skip("this torch always inlines modules")
        with torch._dynamo.config.patch(inline_inbuilt_nn_modules=False):
            module = Holder()
            assert_same(module(torch.ones(1)), run_compiled(module, (torch.ones(1),)))
        assert module.weight.dtype is F8

    def test_a_module_of_torch_that_holds_fp8(self) -> None:
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(4, 8, dtype=F8, _weight=fp8(4, 8))

            def forward(self, x: Tensor) -> Tensor:
                return self.table(x).float()

        module = Holder().requires_grad_(False)
        assert_same(module(torch.tensor([1, 3])), run_compiled(module, (torch.tensor([1, 3]),)))
        if not ALWAYS_INLINED:
            torch._dynamo.reset()
            with torch._dynamo.config.patch(inline_inbuilt_nn_modules=False):
                assert "inline_inbuilt_nn_modules = True" in str(refusal(module, torch.tensor([1, 3])))

    def test_closures_and_globals(self) -> None:
        held = fp8(4, 8)
        check(lambda x: x + held.float(), lambda: (values(4, 8),))
        held.fill_(2.0)
        check(lambda x: x + held.float(), lambda: (values(4, 8),))


class TestGradModes:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_results_and_writes(self, mode: Any) -> None:
        def program(cache: Tensor, x: Tensor) -> Any:
            cache[0] = (x * 2).to(F8)
            return cache.reshape(-1).float(), cache.t(), cache[1:]

        with mode():
            check(program, lambda: (fp8(4, 8), values(8, scale=1)), calls=2)

    def test_parameters_that_require_a_gradient(self) -> None:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(fp8(8, 8))
                self.norm = nn.Parameter(torch.ones(8))

            def forward(self, x: Tensor) -> Tensor:
                return (x * self.norm).to(F8).float() @ self.weight.float() + x * self.norm

        layer = Layer()
        expected, actual = layer(values(2, 8)), run_compiled(layer, (values(2, 8),))
        assert_same(expected, actual)
        assert actual.requires_grad
        with pytest.raises(RuntimeError, match="does not pass gradients through fp8 values"):
            actual.sum().backward()
        assert layer.norm.grad is None

    def test_gradients_beside_fp8_flow(self) -> None:
        """A frozen fp8 input takes nothing away from the rest of the graph."""

        def program(x: Tensor, frozen: Tensor) -> Tensor:
            return (x * frozen.float()).sum()

        frozen = fp8(4, 8)
        gradients = []
        for run in (program, torch.compile(program, backend="deepinfer_neuron")):
            x = values(4, 8).requires_grad_()
            run(x, frozen).backward()
            gradients.append(x.grad)
        assert_same(*gradients)

    def test_no_gradient_is_asked_for(self) -> None:
        """Without grad mode the results are plain."""
        with torch.no_grad():
            result = run_compiled(lambda x: x.to(F8).float(), (values(4).requires_grad_(),))
        assert not result.requires_grad


class TestSharedStorage:
    """Inputs that share storage with one that is written to are one range of bytes to the graph."""

    def test_two_halves_of_a_cache(self, compiled: list[Compiled]) -> None:
        def program(keys: Tensor, rows: Tensor, at: Tensor) -> Any:
            keys[:, 0].index_put_((at,), rows.to(F8))
            keys[:, 1].index_put_((at,), (rows * 0.5).to(F8))
            return keys[:, 0].float(), keys[:, 1].bfloat16()

        def halves(keys: Tensor, values_: Tensor, rows: Tensor, at: Tensor) -> Any:
            keys.index_put_((at,), rows.to(F8))
            values_[at] = rows.to(F8)
            return keys.float(), values_.float()

        check(program, lambda: (fp8(6, 2, 8), values(2, 8), torch.tensor([3, 5])), calls=2)

        def arguments() -> tuple[Tensor, ...]:
            cache = fp8(6, 2, 8)
            return cache[:, 0], cache[:, 1], values(2, 8), torch.tensor([3, 5])

        check(halves, arguments, calls=2)
        targets = {str(node.target) for node in compiled[-1].aot_graphs[0].graph.nodes}
        assert "aten.slice_scatter.default" in targets
        assert not any("as_strided" in target for target in targets)

    def test_records_of_several_types(self) -> None:
        """A cache of records: fp8 values, a float32 scale, bfloat16 values."""

        def program(record: Tensor, codes: Tensor, scale: Tensor, tail: Tensor, x: Tensor) -> Any:
            codes[1] = (x / 2).to(F8)
            scale[1] = 2.0
            tail[1] = x[:4].bfloat16()
            return codes.float() * scale, tail.float(), record.clone()

        def arguments() -> tuple[Tensor, ...]:
            record = torch.arange(80, dtype=torch.uint8).view(4, 20) % 100
            codes, scale, tail = record[:, :8].view(F8), record[:, 8:12].view(torch.float32), record[:, 12:]
            return record, codes, scale, tail.view(torch.bfloat16), values(8, scale=1)

        check(program, arguments, calls=2)

    def test_offsets_that_change(self, compiled: list[Compiled]) -> None:
        def program(part: Tensor) -> Tensor:
            part.copy_(part.float() * 0.5)
            return part.float()

        run = torch.compile(program, backend="deepinfer_neuron")
        for start in (0, 3, 7, 3):
            expected, actual = fp8(4, 16), fp8(4, 16)
            assert_same(program(expected[:, start : start + 5]), run(actual[:, start : start + 5]))
            assert_same(expected, actual)

    def test_what_no_view_describes_is_refused(self) -> None:
        def program(diagonal: Tensor) -> Tensor:
            diagonal.fill_(1.0)
            return diagonal.float()

        error = refusal(program, fp8(64).view(8, 8).diagonal())
        assert "pass the tensor that it is a view of" in str(error)
        assert "L['diagonal']" in error.operation

    def test_as_strided_on_an_input_with_an_offset_is_refused(self) -> None:
        error = refusal(lambda x: x.as_strided((2, 2), (4, 1)).float(), fp8(64)[8:])
        assert "addresses the storage of a graph input" in str(error)


SHARED_RESULTS = {
    "a part": lambda x: (y := x.clone(), y[1:]),
    "chunks of a strided one": lambda x: (y := x[:, 2:6].select_scatter(x[0, :4], 0, 1), *y.chunk(2, -1)),
    "transposed": lambda x: (y := (x.float() * 2).to(F8), y.t(), y.view(torch.uint8)),
    "parts without the whole": lambda x: (y := x.float(), y[0], y.t()[1:])[1:],
    "expanded": lambda x: (y := x.clone(), y[:1].expand(4, 8)),
    "overlapping": lambda x: (y := x.clone(), y.unfold(1, 3, 1)),
    "several types": lambda x: (y := x.clone(), y.view(torch.int32), y.view(torch.int16)[1]),
    "scalars": lambda x: (y := x.clone(), y[0, 0], y[3, 7]),
}


class TestResultsThatShareStorage:
    """With each other: eager's sharing is kept, whatever the device's compiler returns."""

    @pytest.mark.parametrize("name", SHARED_RESULTS)
    def test_equal_and_shared(self, name: str) -> None:
        program = SHARED_RESULTS[name]
        expected, actual = program(fp8(4, 8)), run_compiled(program, (fp8(4, 8),))
        assert_same(expected, actual)
        assert [t.stride() for t in expected] == [t.stride() for t in actual]
        for results in (expected, actual):
            results[0].fill_(1) if name == "expanded" else results[-1].zero_()
        assert_same(expected, actual)


class TestSubclasses:
    def test_fp8_inside_a_subclass_is_refused(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        wrapped = TwoTensor(fp8(4), fp8(4, seed=1))
        assert "fp8 values inside a TwoTensor" in str(refusal(lambda x: x.float(), wrapped))

    def test_other_subclasses_pass(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        wrapped = TwoTensor(values(4), values(4, seed=1))
        result = run_compiled(lambda x, y: x * y.float(), (wrapped, fp8(4)), options={"base_backend": "aot_eager"})
        assert_same(wrapped.a * fp8(4).float(), result.a)


def test_collectives(tmp_path: Any) -> None:
    """Gathering moves bytes; reducing does not."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        def gather(x: Tensor) -> Tensor:
            return functional.all_gather_tensor((x * 2).to(F8), 0, dist.group.WORLD).float()

        assert_same((values(4, 8, scale=1) * 2).to(F8).float(), run_compiled(gather, (values(4, 8, scale=1),)))
        error = refusal(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD), fp8(4))
        assert "_c10d_functional.all_reduce" in str(error)
    finally:
        dist.destroy_process_group()

"""The proof after the pass, and what the backend shows on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Graph, GraphModule

from deepinfer_prep.errors import LeftoverFp8Error
from deepinfer_prep.runtime.backend import compile as compile_module
from deepinfer_prep.runtime.backend.leftover_check import check
from tests.runtime.backend.harness import E8, F8, assert_same, fp8, run_compiled


def graph_with(args: tuple[Any, ...] = (), meta: dict[str, Any] | None = None, **held: Any) -> GraphModule:
    graph = Graph()
    root = nn.Module()
    for name, value in held.items():
        setattr(root, name, value)
        graph.get_attr(name)
    node = graph.call_function(torch.zeros, ((2,), *args))
    node.meta.update(meta or {})
    graph.output((node,))
    return GraphModule(root, graph)


class TestChecker:
    def test_a_clean_graph(self) -> None:
        check(graph_with(meta={"example_value": torch.zeros(2, dtype=torch.uint8)}))

    @pytest.mark.parametrize("dtype", [F8, E8, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2])
    def test_a_type_in_the_arguments(self, dtype: torch.dtype) -> None:
        with pytest.raises(LeftoverFp8Error, match="in its arguments"):
            check(graph_with((dtype,)))

    @pytest.mark.parametrize("key", ["example_value", "val"])
    def test_a_value_in_the_metadata(self, key: str) -> None:
        with pytest.raises(LeftoverFp8Error, match=f"in its metadata '{key}'"):
            check(graph_with(meta={key: (torch.zeros(1), [fp8(2)])}))

    def test_a_tensor_that_the_graph_holds(self) -> None:
        with pytest.raises(LeftoverFp8Error, match="in its held tensor"):
            check(graph_with(weight=nn.Parameter(fp8(2), requires_grad=False)))

    def test_a_sub_graph(self) -> None:
        with pytest.raises(LeftoverFp8Error, match="in its arguments"):
            check(graph_with(body=graph_with((F8,))))

    def test_e5m2_is_no_leftover(self) -> None:
        check(graph_with((torch.float8_e5m2,), {"val": torch.zeros(2).to(torch.float8_e5m2)}))

    def spoil(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pass that forgets a node."""
        legalize = compile_module.legalize

        def forgetful(scope: Any, with_fp8: set[int]) -> None:
            scope.old_nodes = [node for node in scope.old_nodes if node.target != "clone"]
            legalize(scope, with_fp8)

        monkeypatch.setattr(compile_module, "legalize", forgetful)

        def finish(scope: Any) -> None:
            scope.module.recompile()

        monkeypatch.setattr(compile_module.Scope, "finish", finish)

    def test_it_is_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoil(monkeypatch)
        with pytest.raises(BackendCompilerFailed, match="still has an fp8 type in its metadata") as caught:
            run_compiled(lambda x: x.clone(), (fp8(4),), options={"base_backend": "eager"})
        assert isinstance(caught.value.inner_exception, LeftoverFp8Error)
        assert "This is a defect of the deepinfer_neuron backend" in str(caught.value)

    def test_it_can_be_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoil(monkeypatch)
        monkeypatch.setenv("DEEPINFER_FP8_LEGALIZE_CHECK", "0")
        run_compiled(lambda x: x.clone(), (fp8(4),), options={"base_backend": "eager"})


def program(x: Tensor, raw: Tensor) -> Any:
    return torch.cond(raw.sum() > 0, lambda a: a.float() * 2, lambda a: a.float(), (x,))


def arguments() -> tuple[Tensor, ...]:
    x = fp8(4, 8)
    return x, x.view(torch.uint8)


class TestDebug:
    def test_silent_by_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        run_compiled(program, arguments())
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize("value", ["0", "", "false", "off"])
    def test_switched_off(self, value: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setenv("DEEPINFER_FP8_LEGALIZE_DEBUG", value)
        monkeypatch.setenv("DEEPINFER_NEURON_ALIAS_DEBUG", value)
        run_compiled(program, arguments())
        assert capsys.readouterr() == ("", "")

    def test_the_graph_after_the_pass(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setenv("DEEPINFER_FP8_LEGALIZE_DEBUG", "1")
        run_compiled(program, arguments())
        shown = capsys.readouterr().err
        assert "after fp8 legalization" in shown
        assert "deepinfer_decode_e4m3fn(" in shown
        assert '"u8[4, 8]"' in shown
        assert "class cond_true_0" in shown
        assert "f8e4m3fn" not in shown

    def test_inputs_that_share_storage(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setenv("DEEPINFER_NEURON_ALIAS_DEBUG", "1")
        run_compiled(lambda x, y, z: x.float() + y.float() + z.float(), (*arguments(), fp8(4, 8)))
        shown = capsys.readouterr().err
        assert "L['x'] float8_e4m3fn[4, 8] at offset 0, L['y'] uint8[4, 8] at offset 0" in shown
        assert "L['z']" not in shown

    def test_no_input_shares_storage(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setenv("DEEPINFER_NEURON_ALIAS_DEBUG", "1")
        run_compiled(lambda x: x.float(), (fp8(4),))
        assert "inputs that share storage\n  none\n" in capsys.readouterr().err

    @pytest.mark.parametrize("by", ["option", "environment"])
    def test_a_folder_of_graphs(self, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "not" / "there"
        options = {"dump_dir": str(folder)} if by == "option" else {}
        if by == "environment":
            monkeypatch.setenv("DEEPINFER_NEURON_DUMP_DIR", str(folder))
        run_compiled(program, arguments(), options=options)
        before, after = sorted(folder.iterdir(), key=lambda path: path.name.endswith("after.txt"))
        assert before.name.replace("before", "after") == after.name
        assert "float()" in before.read_text()
        assert "decode_e4m3fn" not in before.read_text()
        assert "decode_e4m3fn" in after.read_text()
        assert "code: return torch.cond" in after.read_text()

    def test_a_refused_graph_is_still_dumped(self, tmp_path: Path) -> None:
        with pytest.raises(BackendCompilerFailed):
            run_compiled(lambda x: x + x, (fp8(4),), options={"dump_dir": str(tmp_path)})
        assert [path.name.rpartition("_")[2] for path in tmp_path.iterdir()] == ["before.txt"]


def test_debugging_does_not_change_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_FP8_LEGALIZE_DEBUG", "1")
    monkeypatch.setenv("DEEPINFER_NEURON_ALIAS_DEBUG", "1")
    assert_same(program(*arguments()), run_compiled(program, arguments(), options={"dump_dir": str(tmp_path)}))

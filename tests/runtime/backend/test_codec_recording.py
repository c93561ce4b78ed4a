"""A codec that occurs again in a graph is copied there; the graph is the one that recording it again would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_prep.runtime.backend import codec_operations, codec_recording
from tests.runtime.backend.harness import E8, F8, assert_same, run_compiled, values
from tests.runtime.backend.stand_in import Compiled

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "permuted": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(6, 8),
    "one element": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
}


def four_casts(x: Tensor, form: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The same conversions of four tensors of one form."""
    results = []
    for factor in (1.0, 2.0, -3.0, 0.01):
        codes = form(x * factor).to(F8)
        scales = form(x * factor).to(E8)
        results += [codes, codes.float(), codes.bfloat16(), scales.float()]
    return results


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_copies_are_what_recording_gives(
    form: Callable[[Tensor], Tensor], compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = values(6, 8)
    copied = run_compiled(four_casts, (x, form))
    monkeypatch.setattr(codec_operations, "record", codec_recording._run)
    torch._dynamo.reset()
    recorded = run_compiled(four_casts, (x, form))
    assert_same(recorded, copied)
    assert_same(four_casts(x, form), copied)
    first, second = (record.aot_graphs[0] for record in compiled)
    for one, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        assert described(one) == described(other)
    assert sharing(first) == sharing(second)


def described(node: Node) -> str:
    """What a compiler sees of a node; as text, in which NaN equals itself."""
    value = node.meta.get("val")
    layout = (value.dtype, value.shape, value.stride(), value.device) if isinstance(value, Tensor) else None
    origin = (node.meta.get("original_aten"), node.meta.get("stack_trace"))
    return f"{node.format_node()} {layout} {node.meta.get('tensor_meta')} {origin}"


def sharing(module: GraphModule) -> list[int]:
    """For each node the place of the first one whose value shares its storage."""
    held = [node.meta.get("val") for node in module.graph.nodes]
    storages = [value.untyped_storage()._cdata for value in held if isinstance(value, Tensor)]
    return [storages.index(storage) for storage in storages]


def test_each_form_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def count(mode: Any, codec: Any, *args: Any) -> Tensor:
        runs.append((codec.__name__, args[0].shape))
        return original(mode, codec, *args)

    original = codec_recording._run
    monkeypatch.setattr(codec_recording, "_run", count)
    run_compiled(lambda x, y: [(t * i).to(F8) for t in (x, y) for i in range(3)], (values(2, 4), values(3)))
    assert runs == [("encode_e4m3fn", (2, 4)), ("encode_e4m3fn", (3,))]


def test_branches_record_into_their_own_graphs() -> None:
    """What was recorded into one graph is no part of another."""

    def program(flag: Tensor, x: Tensor) -> Tensor:
        inside = torch.cond(flag, lambda x: x.to(F8).float() * 2, lambda x: (x * 3).to(F8).float(), (x,))
        return inside + x.to(F8).float()

    for flag in (torch.tensor(True), torch.tensor(False)):
        assert_same(program(flag, values(4)), run_compiled(program, (flag, values(4))))

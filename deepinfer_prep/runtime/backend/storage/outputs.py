"""What the results of the compiled graph are in the program.

The compiled graph returns contiguous tensors of its own memory, bytes where the program has fp8. Results that
share storage with each other in the program are returned separately and put into a common storage again: AOT
would take some of them out of others by strides that the compiler's results do not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from deepinfer_prep.runtime.backend.byte_formats import carried
from deepinfer_prep.runtime.backend.node_values import logical_value
from deepinfer_prep.runtime.backend.scope import Scope

_ALIGNMENT = 16


@dataclass(frozen=True)
class Place:
    """Where a result lies in a storage that it shares. Strides and offset in elements."""

    group: int
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class OutputView:
    """What one output of the compiled graph is in the program.

    dtype: the fp8 type to view it as. argument: the argument that it is. place: its place in a storage that
    it shares with other outputs. with_gradient: whether eager would give it a gradient.
    """

    dtype: torch.dtype | None = None
    argument: int | None = None
    place: Place | None = None
    with_gradient: bool = False


def plan_outputs(module: GraphModule) -> list[OutputView]:
    """One view for each output, in order; to be called before the graph is rewritten."""
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    leaves: list[Any] = list(nodes[-1].args[0])
    values = [logical_value(leaf) if isinstance(leaf, Node) else None for leaf in leaves]
    places = _common_places(values, {_storage(logical_value(node)) for node in inputs})
    views = []
    for leaf, value, place in zip(leaves, values, places, strict=True):
        fmt = carried(value)
        views.append(
            OutputView(
                dtype=None if fmt is None else fmt.dtype,
                argument=inputs.index(leaf) if leaf in inputs else None,
                place=place,
                with_gradient=isinstance(value, Tensor) and value.requires_grad,
            )
        )
    return views


def _storage(value: object) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, FakeTensor) else None


def _common_places(values: Sequence[Any], of_inputs: set[int | None]) -> list[Place | None]:
    """Places of results that share storage with each other and with no input."""
    groups: dict[int | None, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        groups[_storage(value)].append(index)
    places: list[Place | None] = [None] * len(values)
    for number, (storage, members) in enumerate(groups.items()):
        tensors = [values[index] for index in members]
        if storage is None or storage in of_inputs or len(members) < 2 or any(t.requires_grad for t in tensors):
            continue
        first = min(tensor.storage_offset() * tensor.element_size() for tensor in tensors)
        first -= first % _ALIGNMENT
        for index, tensor in zip(members, tensors, strict=True):
            offset = int(tensor.storage_offset()) - first // tensor.element_size()
            places[index] = Place(number, tuple(tensor.stride()), offset)
    return places


def separate_outputs(scope: Scope, outputs: Sequence[OutputView]) -> None:
    """Return results that share storage as contiguous tensors of their own; after the nodes are rewritten."""
    output = scope.old_nodes[-1]
    leaves: list[Any] = list(output.args[0])
    for index, view in enumerate(outputs):
        if view.place is not None:
            kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
            with scope.graph.inserting_before(output):
                clone = scope.graph.call_function(torch.ops.aten.clone.default, (leaves[index],), kwargs)
            clone.meta.update(leaves[index].meta)
            leaves[index] = clone
    output.args = (tuple(leaves),)


def restore_outputs(
    compiled: Callable[..., Sequence[Any]], outputs: Sequence[OutputView]
) -> Callable[..., tuple[Any, ...]]:
    """A callable that returns what the program does, around one that returns bytes."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, view in enumerate(outputs):
        if view.place is not None:
            groups[view.place.group].append(index)

    def run(*args: Any) -> tuple[Any, ...]:
        results = compiled(*args)
        restored = [_restore(result, view, args) for result, view in zip(results, outputs, strict=True)]
        for members in groups.values():
            _join(restored, outputs, members)
        return tuple(restored)

    return run


def _restore(result: Any, view: OutputView, args: Sequence[Any]) -> Any:
    if view.argument is not None:
        return args[view.argument]
    return result if view.dtype is None else result.view(view.dtype)


def _join(results: list[Any], outputs: Sequence[OutputView], members: list[int]) -> None:
    """Put results of their own memory into a common storage, at their places."""
    placed = [(index, results[index], place) for index in members if (place := outputs[index].place) is not None]
    end = max(_end(result, place) for _, result, place in placed)
    storage = torch.zeros(end, dtype=torch.uint8, device=placed[0][1].device).untyped_storage()
    for index, result, place in placed:
        flat = torch.empty(0, dtype=result.dtype, device=result.device).set_(storage)
        view = flat.as_strided(result.shape, place.stride, place.offset)
        _write(flat, view, result)
        results[index] = view.detach()


def _end(result: Tensor, place: Place) -> int:
    """The byte after the last one of a result's place, rounded up to whole elements of any size."""
    span = sum((size - 1) * step for size, step in zip(result.shape, place.stride, strict=True))
    end = (place.offset + span + 1) * result.element_size() if result.numel() else 0
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def _write(flat: Tensor, view: Tensor, result: Tensor) -> None:
    """Write a result to its place; elements that lie in several places at once are equal."""
    try:
        view.copy_(result)
    except RuntimeError:  # torch does not copy into overlapping elements
        positions = torch.arange(flat.numel(), device=flat.device)
        flat[positions.as_strided(view.shape, view.stride(), view.storage_offset()).reshape(-1)] = result.reshape(-1)

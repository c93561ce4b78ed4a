"""Writes codecs into the graph that AOT records.

AOT records an operation by running it through Python four times over, about a millisecond each, and a quantized
product brings fifty of them. The operations of a codec depend on nothing but the form of its argument. They are
recorded by running them the first time that a form occurs in a graph; every further time the nodes are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree

_SAME_FOR_EACH_COPY = ("original_aten", "tensor_meta")
"""Metadata that a copy takes from the recorded node; all else says where in the program it stands."""


@dataclass(frozen=True)
class _Recording:
    """A codec's nodes in a graph, in order, and those for its argument and its result."""

    source: Node
    nodes: tuple[Node, ...]
    result: Node


_recordings: WeakKeyDictionary[Any, dict[Hashable, _Recording]] = WeakKeyDictionary()
"""For each tracer, and so for each graph, what was recorded into it."""


def record(mode: ProxyTorchDispatchMode, codec: Callable[..., Tensor], values: Tensor, *rest: Any) -> Tensor:
    """The codec's result on a traced tensor, with its operations in the graph of the mode's tracer."""
    tracer: Any = mode.tracer
    recordings = _recordings.setdefault(tracer, {})
    source = tracer.unwrap_proxy(values)
    if not isinstance(values, FakeTensor) or not isinstance(source, Proxy):
        return _run(mode, codec, values, *rest)
    form = (codec, values.shape, values.stride(), values.storage_offset(), values.dtype, values.device, rest)
    if form in recordings:
        return _copy(tracer, recordings[form], source.node, values)
    before = len(tracer.graph.nodes)
    result = _run(mode, codec, values, *rest)
    nodes = tuple(islice(tracer.graph.nodes, before, None))
    if all(node.op == "call_function" and {source.node, *nodes}.issuperset(node.all_input_nodes) for node in nodes):
        recordings[form] = _Recording(source.node, nodes, tracer.unwrap_proxy(result).node)
    return result


def _run(mode: ProxyTorchDispatchMode, codec: Callable[..., Tensor], *args: Any) -> Tensor:
    with mode:
        return codec(*args)


def _copy(tracer: Any, recording: _Recording, source: Node, values: FakeTensor) -> Tensor:
    copies = {recording.source: source}
    fake = _Likenesses(values.fake_mode)
    fake.let_share(recording.source.meta["val"], values)
    with unset_fake_temporarily():
        for node in recording.nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            copy = tracer.create_node(node.op, node.target, args, kwargs, node.name)
            copy.meta.update({key: node.meta[key] for key in _SAME_FOR_EACH_COPY if key in node.meta})
            copy.meta["val"] = fake.likeness(node.meta["val"])
            copies[node] = copy
    node = copies[recording.result]
    result: Tensor = track_tensor_tree(node.meta["val"], tracer.proxy(node), constant=None, tracer=tracer)
    return result


class _Likenesses:
    """Fake tensors like others, which share storage among each other as those do."""

    def __init__(self, fake_mode: Any) -> None:
        self._fake_mode = fake_mode
        self._storages: dict[int, torch.UntypedStorage] = {}

    def let_share(self, recorded: Tensor, new: Tensor) -> None:
        """Give likenesses of what shares storage with `recorded` the storage of `new`."""
        self._storages[recorded.untyped_storage()._cdata] = new.untyped_storage()

    def likeness(self, recorded: Tensor) -> FakeTensor:
        """To be called outside the fake mode."""
        storage = recorded.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = torch.empty(
                storage.nbytes(), dtype=torch.uint8, device="meta"
            ).untyped_storage()
        held = torch.empty(0, dtype=recorded.dtype, device="meta").set_(
            self._storages[storage._cdata], recorded.storage_offset(), recorded.shape, recorded.stride()
        )
        return FakeTensor(self._fake_mode, held, recorded.device)

"""Conversions between fp8 and other types: decode, encode, and copies that do both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from deepinfer_prep.runtime.backend.byte_formats import CARRIER, ByteFormat, carried
from deepinfer_prep.runtime.backend.calls import Call
from deepinfer_prep.runtime.backend.emitter import Emitter
from deepinfer_prep.runtime.backend.encoded_numbers import encode_number
from deepinfer_prep.runtime.backend.storage.layout import as_bytes

_TO_COPY = torch.ops.aten._to_copy.default
_FULL = torch.ops.aten.full.default


def convert(emitter: Emitter, call: Call) -> Any:
    """A conversion or copy: bytes move first, since they are the smaller, then they are decoded."""
    source = call.arguments.get("self", call.arguments.get("a"))
    assert isinstance(source, Tensor), call.func
    value = call.run()
    where_to = _where_to(source, call.arguments)
    if carried(source) is None:
        node = converted(emitter, source, value.dtype)
        node = _copied(emitter, node, as_bytes(value), where_to)
    elif value.dtype == source.dtype:
        node = emitter.emit(_TO_COPY, (emitter.node_of(source),), {**where_to, "dtype": CARRIER}, value)
    else:
        with torch.no_grad():
            copied = _TO_COPY(source, **where_to) if where_to else source
        node = _copied(emitter, emitter.node_of(source), copied, where_to)
        node = _from_bytes(emitter, node, copied, value.dtype)
    emitter.bind(value, node)
    return value


def _where_to(source: Tensor, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a conversion changes besides the type: device, memory format; empty if nothing."""
    where_to: dict[str, Any] = {}
    if arguments.get("memory_format") is not None:
        where_to["memory_format"] = arguments["memory_format"]
    device = arguments.get("device")
    if device is not None and torch.device(device) != source.device:
        where_to.update(device=device, non_blocking=arguments.get("non_blocking", False))
    return where_to


def _copied(emitter: Emitter, node: Node, value: Tensor, where_to: Mapping[str, Any]) -> Node:
    """A node's bytes on another device or in another memory format, if the call asks for one.

    The type is always given: AOT takes a copy that names none for the tensor that it copies.
    """
    if not where_to:
        return node
    return _single(emitter.emit(_TO_COPY, (node,), {**where_to, "dtype": CARRIER}, value))


def converted(emitter: Emitter, tensor: Tensor, dtype: torch.dtype) -> Node:
    """A node with a tensor's values in another type, as torch's copy would convert them."""
    target = carried(dtype)
    number = emitter.numbers.get(id(tensor))
    if target is not None and number is not None:
        byte = encode_number(number, target)
        kwargs = {"dtype": CARRIER, "device": tensor.device}
        return _single(emitter.emit(_FULL, ([], byte), kwargs, torch.empty_like(tensor, dtype=CARRIER)))
    node = emitter.node_of(tensor)
    if carried(tensor) is not None:
        return _from_bytes(emitter, node, tensor, dtype)
    if target is None:
        return _single(emitter.emit(_TO_COPY, (node,), {"dtype": dtype}, torch.empty_like(tensor, dtype=dtype)))
    return encoded(emitter, node, tensor, target)


def _from_bytes(emitter: Emitter, node: Node, tensor: Tensor, dtype: torch.dtype) -> Node:
    """Decode a node that holds the bytes of `tensor`; encode again where `dtype` is fp8 as well."""
    target = carried(dtype)
    if target is None:
        return decoded(emitter, node, tensor, dtype)
    if target is carried(tensor):
        return node
    floats = torch.empty_like(tensor, dtype=torch.float32)
    return encoded(emitter, decoded(emitter, node, tensor, torch.float32), floats, target)


def decoded(emitter: Emitter, node: Node, tensor: Tensor, dtype: torch.dtype) -> Node:
    fmt = carried(tensor)
    assert fmt is not None
    return _single(emitter.emit(fmt.decode, (node, dtype), {}, torch.empty_like(tensor, dtype=dtype)))


def decoded_from(emitter: Emitter, node: Node, like: Tensor, fmt: ByteFormat) -> Node:
    """The float32 values of a node that holds bytes of `fmt`, shaped as `like`."""
    floats = torch.empty_like(like, dtype=torch.float32)
    return _single(emitter.emit(fmt.decode, (node, torch.float32), {}, floats))


def encoded(emitter: Emitter, node: Node, tensor: Tensor, fmt: ByteFormat) -> Node:
    return _single(emitter.emit(fmt.encode, (node,), {}, torch.empty_like(tensor, dtype=CARRIER)))


def _single(emitted: Any) -> Node:
    assert isinstance(emitted, Node), emitted
    return emitted

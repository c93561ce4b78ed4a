"""Views of fp8 bytes as another type, and of other types as fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer_prep.runtime.backend.byte_formats import CARRIER, carried
from deepinfer_prep.runtime.backend.calls import Call

if TYPE_CHECKING:
    from deepinfer_prep.runtime.backend.rewriter import Rewriter


def same(rewriter: Rewriter, call: Call) -> Any:
    """detach: bytes carry no gradient, and the compiler's search for written inputs stops at it."""
    value = call.run()
    rewriter.bind(value, rewriter.node_of(call.arguments["self"]))
    return value


def bitcast(rewriter: Rewriter, call: Call) -> Any:
    """view(dtype): fp8 and uint8 are the same bytes; any other type is a view of the uint8 tensor."""
    source, dtype = call.arguments["self"], call.arguments["dtype"]
    value = call.run()
    node = rewriter.node_of(source)
    emitted = CARRIER if carried(dtype) is not None else dtype
    held = CARRIER if carried(source) is not None else source.dtype
    if emitted != held:
        node = rewriter.emit(call.func, (node, emitted), {}, value)
    rewriter.bind(value, node)
    return value

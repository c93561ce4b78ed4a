"""Which handler writes which kind of operation on bytes.

A handler runs the operation on the fake values of the user's program, emits nodes that compute the same on
bytes, and returns what the operation returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer_prep.runtime.backend.calls import Call
from deepinfer_prep.runtime.backend.handlers.arithmetic import compare, matmul, reduce
from deepinfer_prep.runtime.backend.handlers.bitcasts import bitcast, same
from deepinfer_prep.runtime.backend.handlers.conversions import convert
from deepinfer_prep.runtime.backend.handlers.moves import move, split
from deepinfer_prep.runtime.backend.operations import Kind

if TYPE_CHECKING:
    from deepinfer_prep.runtime.backend.rewriter import Rewriter

HANDLERS: dict[Kind, Callable[[Rewriter, Call], Any]] = {
    Kind.SAME: same,
    Kind.MOVE: move,
    Kind.SPLIT: split,
    Kind.FILL: move,
    Kind.CONVERT: convert,
    Kind.BITCAST: bitcast,
    Kind.REDUCE: reduce,
    Kind.COMPARE: compare,
    Kind.MATMUL: matmul,
}

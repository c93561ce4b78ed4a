"""The codecs as operations that stay whole until a compiler traces them.

AOT runs a graph twice: once to learn what it writes and returns, once to record its operations, both times with
Python bookkeeping for each operation. A codec is one operation for the first run, and only the second one looks
inside; the graph that AOT hands on holds the codec's aten operations and nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from deepinfer_prep.runtime.backend import codecs
from deepinfer_prep.runtime.backend.codec_recording import record

_AUTOGRAD_KEYS = (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.AutogradPrivateUse1)
"""Gradients end at fp8, so that nothing is recorded for them."""


_KNOWN_MODES = (FunctionalTensorMode, FakeTensorMode, ProxyTorchDispatchMode)
"""What AOT traces with. Other modes, such as that of activation checkpointing, get the codec's aten operations."""


class CodecOperation(HigherOrderOperator):
    """A codec, in graphs `torch.ops.higher_order.deepinfer_<name of the codec>`.

    Its result has the shape and the order of dimensions of its first argument; it writes nothing.
    """

    def __init__(self, codec: Callable[..., Tensor]) -> None:
        super().__init__(f"deepinfer_{codec.__name__}")  # type: ignore[no-untyped-call]
        self._codec = codec
        for key in _AUTOGRAD_KEYS:
            self.fallthrough(key)  # type: ignore[no-untyped-call]
        self.py_impl(DispatchKey.CompositeExplicitAutograd)(codec)
        self.py_impl(FakeTensorMode)(_allocate)
        self.py_impl(ProxyTorchDispatchMode)(self._trace)
        self.py_functionalize_impl(self._unwrap)

    def __call__(self, *args: Any) -> Any:
        """Call the codec: with values to encode, or with codes and the dtype to decode them to."""
        if all(isinstance(mode, _KNOWN_MODES) for mode in _get_current_dispatch_mode_stack()):
            return super().__call__(*args)  # type: ignore[no-untyped-call]
        return self._codec(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _operation, (self._codec.__name__,)

    def _trace(self, mode: ProxyTorchDispatchMode, *args: Any) -> Tensor:
        return record(mode, self._codec, *args)

    def _unwrap(self, context: Any, *args: Any) -> Any:
        unwrapped = context.unwrap_tensors(args)
        with context.redispatch_to_next():
            return context.wrap_tensors(self(*unwrapped))


def _allocate(mode: FakeTensorMode, values: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    with mode:
        return torch.empty_like(values, dtype=dtype)


def _operation(name: str) -> CodecOperation:
    """The operation of a codec, for unpickling."""
    return _OPERATIONS[name]


decode_e4m3fn = CodecOperation(codecs.decode_e4m3fn)
encode_e4m3fn = CodecOperation(codecs.encode_e4m3fn)
decode_e8m0 = CodecOperation(codecs.decode_e8m0)
encode_e8m0 = CodecOperation(codecs.encode_e8m0)

_OPERATIONS = {
    operation._codec.__name__: operation for operation in (decode_e4m3fn, encode_e4m3fn, decode_e8m0, encode_e8m0)
}

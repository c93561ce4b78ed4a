"""A stand-in for the operation by which torch_neuronx launches NKI kernels from graphs.

`nki_kernel_wrapper(kernel_idx=, grid=, backend_config=, operand_output_aliases=, args=, arg_names=,
constant_args_key=)`; beside it a registry that gives the kernel of an index. Kernels here are plain functions
on tensors, and like the real ones they take no fp8 tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import allow_in_graph
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree
from torch.utils import _pytree as pytree

Kernel = Callable[..., Any]


class KernelRegistry:
    def __init__(self) -> None:
        self._kernels: list[Kernel] = []

    def add(self, kernel: Kernel) -> int:
        self._kernels.append(kernel)
        return len(self._kernels) - 1

    def get_func(self, index: int) -> Kernel:
        return self._kernels[index]


kernel_registry = KernelRegistry()


class NKIKernelWrapper(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("nki_kernel_wrapper", cacheable=True)

    def __call__(self, **launch: Any) -> Any:
        return super().__call__(**launch)


nki_kernel_wrapper = allow_in_graph(NKIKernelWrapper())


def _run(*, kernel_idx: int, args: Any, **rest: Any) -> Any:
    return kernel_registry.get_func(kernel_idx)(*args)


@nki_kernel_wrapper.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
def _eager(**launch: Any) -> Any:
    return _run(**launch)


@nki_kernel_wrapper.py_impl(FakeTensorMode)
def _fake(mode: FakeTensorMode, **launch: Any) -> Any:
    with mode:
        return _run(**launch)


@nki_kernel_wrapper.py_impl(ProxyTorchDispatchMode)
def _proxy(mode: ProxyTorchDispatchMode, **launch: Any) -> Any:
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, launch)
    proxy = mode.tracer.create_proxy("call_function", nki_kernel_wrapper, (), proxies)
    return track_tensor_tree(_run(**launch), proxy, constant=None, tracer=mode.tracer)


@nki_kernel_wrapper.py_functionalize_impl
def _functionalize(ctx: Any, **launch: Any) -> Any:
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(nki_kernel_wrapper(**ctx.unwrap_tensors(launch)))


@nki_kernel_wrapper.py_impl(torch._C.DispatchKey.Autograd)
def _autograd(**launch: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return nki_kernel_wrapper(**launch)


def wrap_nki(kernel: Kernel, *names: str) -> Callable[..., Any]:
    """A callable that launches a kernel whose parameters have the given names."""
    index = kernel_registry.add(kernel)

    def launch(*args: Any) -> Any:
        return nki_kernel_wrapper(
            kernel_idx=index,
            grid=(2,),
            backend_config="",
            operand_output_aliases={},
            args=args,
            arg_names=names,
            constant_args_key=-1,
        )

    return launch

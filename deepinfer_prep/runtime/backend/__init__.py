"""The `deepinfer_neuron` backend of torch.compile: fp8 graphs for hardware that has no e4m3fn.

Every fp8 value of a graph is carried as bytes, and converted where its value is used; what comes out is what
eager fp8 gives, or an error that names the operation and the line. torch finds the backend by its entry
point, so `torch.compile(fn, backend="deepinfer_neuron")` needs no import of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_prep.runtime.backend.declarations import declare_fp8

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["declare_fp8", "deepinfer_neuron"]


def deepinfer_neuron(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    options: `base_backend` (a backend's name or a callable) compiles for this host instead of with
    torch-neuronx; `dump_dir` is a folder for the graphs before and after; all others, and `mode`, are
    handed on to the compiler.

    :raises LegalizationError: for an operation that has no exact form on bytes.
    :raises NeuronUnavailableError: if torch-neuronx is needed and absent.
    """
    # Listing or looking up backends must not load the pass.
    from deepinfer_prep.runtime.backend.compile import compile_graph

    return compile_graph(gm, example_inputs, options, mode)

"""The proof that a legalized graph holds no fp8 type."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from deepinfer_prep.errors import LeftoverFp8Error
from deepinfer_prep.runtime.backend.node_values import holds_8_bit_floats, operation_name, user_line
from deepinfer_prep.runtime.backend.subgraphs import attribute, graph_modules

_METADATA = ("example_value", "val", "tensor_meta")
"""Metadata that describes a node's value. `grapharg`, Dynamo's handle on the caller's own argument, does
not: that argument stays fp8, and becomes a uint8 view at the call."""


def check(module: GraphModule) -> None:
    """Walk a graph and all its sub-graphs: arguments, metadata, held tensors.

    :raises LeftoverFp8Error: naming the first node where an fp8 type is left.
    """
    for part in graph_modules(module):
        for node in part.graph.nodes:
            place = _leftover(part, node)
            if place is not None:
                raise LeftoverFp8Error(
                    f"{operation_name(node)} (node {node.name}) still has an fp8 type in its {place} after "
                    f"legalization, at {user_line(node)}. This is a defect of the deepinfer_neuron backend, "
                    "please report it with the dump that DEEPINFER_NEURON_DUMP_DIR writes."
                )
        for name, held in (*part.named_parameters(), *part.named_buffers()):
            if holds_8_bit_floats(held):
                raise LeftoverFp8Error(f"the graph still holds {name} as {held.dtype} after legalization")


def _leftover(module: GraphModule, node: Node) -> str | None:
    """Where a node still has an fp8 type."""
    if holds_8_bit_floats((node.args, node.kwargs)):
        return "arguments"
    for key in _METADATA:
        if holds_8_bit_floats(node.meta.get(key)):
            return f"metadata '{key}'"
    if node.op == "get_attr" and holds_8_bit_floats(attribute(module, str(node.target))):
        return "held tensor"
    return None

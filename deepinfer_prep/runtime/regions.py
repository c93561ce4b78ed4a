"""Parts of a layer that are compiled once for all layers of a kind.

A whole step of a deep model is one large graph, which takes long to compile where it compiles at all. A region is one
part of a layer (up to the window's store, attention, experts, ...), compiled for itself. It takes the layer's weights
and caches as arguments, so layers of a kind (ratio 0, ratio 2 with and without its own index, ...) share a graph.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from deepinfer_prep.errors import PrepError

__all__ = ["BUCKETS", "Region"]

BUCKETS = (1, 4, 16, 32, 64, 128)
"""Numbers of tokens that a region is compiled for, unless others are given."""

BACKEND = "deepinfer_neuron"


class Region:
    """One kind of a part of a layer; a graph of its own for every bucket and every set of static shapes.

    Args:
        function: takes a tuple of tensors [m, ...], a row for each token, then whatever else the part needs; returns
            tensors [m, ...], in any structure. Tokens must not depend on how many there are, as they do where caches
            have an axis of sequences and a token's number says which is its own.
        buckets: numbers of tokens to compile for, ascending; a step that is not among them is padded.
    """

    def __init__(self, function: Callable[..., Any], buckets: Sequence[int] = BUCKETS) -> None:
        self._function = function
        self._buckets = tuple(buckets)
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    @property
    def graphs(self) -> int:
        """How many graphs there are so far."""
        return len(self._compiled)

    def __call__(self, rows: Sequence[torch.Tensor], *others: Any) -> Any:
        """Run on as many tokens as `rows` have, padded to the next bucket by repeating the last one.

        A repeated token writes into caches what the last one writes there, so that padding needs no rows of its own.

        Args:
            rows: tensors [m, ...].
            others: weights, caches and the like: tensors, numbers, and lists, tuples and dicts of them.

        Returns:
            What the function returns, for the tokens given.

        Raises:
            PrepError: there are no tokens, or more than the largest bucket.
        """
        count = rows[0].shape[0]
        bucket = self._bucket(count)
        arguments = (tuple(_padded(one, bucket) for one in rows), *others)
        found = self._for_shapes(arguments)(*arguments)
        return pytree.tree_map(lambda one: one[:count], found)

    def _bucket(self, count: int) -> int:
        fitting = [bucket for bucket in self._buckets if bucket >= count]
        if count == 0 or not fitting:
            raise PrepError(
                f"A region was called with {count} tokens and takes 1 to {self._buckets[-1]}. Split the step, or give "
                "Region larger buckets."
            )
        return fitting[0]

    def _for_shapes(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        leaves, structure = pytree.tree_flatten(arguments)
        key = (structure, *map(_static, leaves))
        if key not in self._compiled:
            self._compiled[key] = torch.compile(_copy(self._function), backend=BACKEND, dynamic=False, fullgraph=True)
        return self._compiled[key]


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    missing = count - rows.shape[0]
    return rows if missing == 0 else torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])


def _static(leaf: Any) -> Hashable:
    """What of an argument a graph is compiled for."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under code of its own: torch counts and limits graphs by code object."""

    def run(*arguments: Any) -> Any:
        return function(*arguments)

    return types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)

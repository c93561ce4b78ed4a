"""Tensors that a checkpoint stores although the model ties their parameter to another: are they equal to it?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.plan import TiedTensor
from deepinfer_prep.runtime.loading.slices import Slice, bounds_of

_BYTES_AT_ONCE = 64 * 1024 * 1024


def differing(checkpoint: PreparedCheckpoint, tied: Sequence[TiedTensor]) -> Iterator[str]:
    """A sentence for every tied tensor whose stored values are lost, because others are stored for its parameter."""
    for one in tied:
        if not _are_equal(checkpoint, one):
            yield (
                f"{one.dropped!r} is stored and differs from {one.loaded!r}, but the model ties their parameters, so "
                "its values are not loaded. If they are meant, build the model untied (tie_word_embeddings=False)."
            )


def _are_equal(checkpoint: PreparedCheckpoint, tied: TiedTensor) -> bool:
    dropped, loaded = checkpoint.tensor(tied.dropped), checkpoint.tensor(tied.loaded)
    if (dropped.dtype, dropped.shape) != (loaded.dtype, loaded.shape):
        return False
    return all(
        torch.equal(_bytes(checkpoint.read(tied.dropped, part)), _bytes(checkpoint.read(tied.loaded, part)))
        for part in _pieces(tied.part, dropped.shape, dropped.dtype.itemsize)
    )


def _pieces(part: Slice, shape: tuple[int, ...], item_bytes: int) -> Iterator[Slice]:
    """A part of a matrix or vector in pieces of some rows; any other part as it is."""
    if len(shape) not in (1, 2):
        yield part
        return
    first, last = bounds_of(part, shape, "")[0]
    step = max(1, _BYTES_AT_ONCE // max(1, math.prod(shape[1:]) * item_bytes))
    for row in range(first, last, step):
        yield Slice(rows=(row, min(row + step, last)), columns=part.columns)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)

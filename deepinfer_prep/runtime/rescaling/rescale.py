"""Halving the fp8 weights of a model that is in memory already, for checkpoints that were not prepared."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import stringzilla
from torch import nn

from deepinfer_prep import fp8
from deepinfer_prep.errors import RefusedError
from deepinfer_prep.runtime import held_tensors, neuron, settings
from deepinfer_prep.runtime.rescaling import byte_access
from deepinfer_prep.runtime.rescaling.address_space import mappings
from deepinfer_prep.runtime.rescaling.byte_spans import Spans, union
from deepinfer_prep.runtime.rescaling.weight_groups import (
    NamedSpans,
    Survey,
    WeightGroup,
    clashes,
    survey,
    weight_groups,
)

log = logging.getLogger(__name__)

_ABOVE_240 = bytes(fp8.ABOVE_240_CODES)
_ZEROS = b"\x00\x80"


def rescale_fp8_weights(model: nn.Module) -> int:
    """Bring every float8_e4m3fn weight into the hardware's range, in place: codes halved, scales doubled.

    Parameters and buffers of any strides, on any device. A scale is a weight's `.sf` attribute or stands
    beside it as `<name>_scale_inv`, `<name>_scale` or, for `weight`, `scale`; kernel scales attached before
    are kept in step. Each byte changes once, however many names, slices and views lead to it.

    Weights that share bytes or a scale change together, and only if one of them holds a code above 240:
    below that the hardware reads the same value. After halving no such code is left, so a second call does
    nothing, whatever became of the model object in between (copied, saved and loaded, moved); and a call
    after some weights were loaded anew changes those. Buffers that are not persistent and have no scale (an
    fp8 KV cache) are left alone.

    Does nothing with `DEEPINFER_NEURON_FP8_MAX=448` and on chips that read e4m3fn themselves.

    Returns:
        How many distinct weights changed.

    Raises:
        RefusedError: a weight has no scale, or a scale cannot be doubled or must not be (e8m0 254 or 255, a
            float whose double is infinite, NaN, only zeros, a scale that another weight needs unchanged), or
            memory is mapped read-only or shares a file with others. Everything wrong is named at once, and
            nothing was changed.
    """
    if settings.leaves_e4m3fn() or not neuron.computes_in_e4m3():
        return 0
    found = survey(model)
    changing = [group for group in weight_groups(found) if _holds_above_240(group)]
    reasons = (
        *found.refusals,
        *_scale_refusals(found, changing),
        *clashes(found, changing),
        *_memory_refusals(changing),
    )
    if reasons:
        raise RefusedError(*(*reasons, "Nothing was changed."))
    for spans in union(weight.spans for group in changing for weight in group.weights):
        for piece in byte_access.pieces(spans):
            fp8.halve(piece.codes, piece.codes)
            piece.write_back()
    for kind, spans in _scale_bytes(changing):
        for piece in byte_access.pieces(spans):
            fp8.double(piece.codes, kind, piece.codes)
            piece.write_back()
    count = sum(len(group.weights) for group in changing)
    log.info("halved %d of %d fp8 weights; the hardware reads the others as they are", count, len(found.weights))
    return count


def holds_above_240(weight: Spans) -> bool:
    """Whether some bytes hold a code of 256 to 448, which the hardware reads as infinity or NaN."""
    return any(stringzilla.find_first_of(piece.codes.data, _ABOVE_240) >= 0 for piece in byte_access.pieces(weight))


def _holds_above_240(group: WeightGroup) -> bool:
    return any(holds_above_240(weight.spans) for weight in group.weights)


def _scale_bytes(changing: list[WeightGroup]) -> Iterator[tuple[str, Spans]]:
    by_kind: dict[str, list[Spans]] = {}
    for group in changing:
        for scale in group.scales:
            by_kind.setdefault(scale.kind, []).append(scale.spans)
    for kind, parts in by_kind.items():
        for spans in union(parts):
            yield kind, spans


def _scale_refusals(found: Survey, changing: list[WeightGroup]) -> Iterator[str]:
    doubled = {id(scale) for group in changing for scale in group.scales}
    for scale in found.scales:
        for piece in byte_access.pieces(scale.spans):
            problem = held_tensors.problem(piece.codes, scale.kind, id(scale) in doubled)
            if problem:
                yield f"{scale.name}: {problem}. Load a checkpoint with a sound scale."
                break
    for weight, scale in ((found.weights[first], found.scales[second]) for first, second in sorted(found.pairs)):
        if scale.kind != "E8M0" and not _has_nonzero(scale, b"\x00") and _has_nonzero(weight, _ZEROS):
            yield f"{scale.name}: holds only zeros, but {weight.name} does not: the scale was never loaded. Load it."


def _memory_refusals(changing: list[WeightGroup]) -> Iterator[str]:
    address_space = mappings()
    for group in changing:
        for named in (*group.weights, *group.scales):
            if problem := address_space.problem(named.spans):
                yield f"{named.name}: {problem}"


def _has_nonzero(named: NamedSpans, zeros: bytes) -> bool:
    return any(stringzilla.find_first_not_of(piece.codes.data, zeros) >= 0 for piece in byte_access.pieces(named.spans))

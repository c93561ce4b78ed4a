"""max8, nc_find_index8 and nc_match_replace8: the eight largest values of a partition, on VectorE.

Aws-neuron-sdk docs: nki/api/nki.isa.max8, nc_find_index8, nc_match_replace8. Sorting more than eight is rounds of the
three: max8 finds values, nc_find_index8 their places, nc_match_replace8 puts something lower in those places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import hardware, rules
from ..call import Call, Engine, free_elements, same_dtype
from ..numeric import F32, constant_f32, to_dtype
from ..tensor import Tensor

_INDEX_TYPES = ("uint16", "uint32")


def max8(dst: Any, src: Any, name: str | None = None) -> None:
    """dst [P, 8] = the eight largest elements of each partition of src, in descending order."""
    call = Call("max8")
    source, out = call.source("src", src), call.destination("dst", dst)
    call.check_geometry(free_dims=hardware.MAX_REDUCED_DIMS)
    _check_width(call, "src", source)
    _check_eight(call, "dst", out, source)
    if call.options.arithmetic:
        values = _rows(call, "src", source)
        call.store("dst", out, -np.sort(-values, axis=1)[:, : hardware.MAX8])
    call.finish(Engine.vector, free_elements(source))


def nc_find_index8(dst: Any, data: Any, vals: Any, name: str | None = None) -> None:
    """dst [P, 8] = where each of vals [P, 8] first stands in data; equal vals take one occurrence after another."""
    call = Call("nc_find_index8")
    source, wanted = call.source("data", data), call.source("vals", vals)
    out = call.destination("dst", dst)
    call.check_geometry(free_dims=hardware.MAX_REDUCED_DIMS)
    _check_width(call, "data", source)
    _check_eight(call, "vals", wanted, source)
    _check_eight(call, "dst", out, source)
    _check_index_type(call, "dst", out)
    if call.options.arithmetic:
        places = _places(call, _rows(call, "data", source), _rows(call, "vals", wanted), range(hardware.MAX8))
        out.array()[...] = places.astype(out.dtype.numpy).reshape(out.shape)
    call.finish(Engine.vector, free_elements(source))


def nc_match_replace8(dst: Any, data: Any, vals: Any, imm: float, dst_idx: Any = None, name: str | None = None) -> None:
    """dst = data with the first occurrence of each of vals [P, 8] replaced by imm; dst_idx [P, 8] = where they stood.

    Equal vals take one occurrence after another, from the last of vals to the first (nc_find_index8: the other way).
    """
    call = Call("nc_match_replace8")
    source, wanted = call.source("data", data), call.source("vals", vals)
    out = call.destination("dst", dst)
    index = None if dst_idx is None else call.destination("dst_idx", dst_idx)
    call.check_geometry(free_dims=hardware.MAX_REDUCED_DIMS)
    _check_width(call, "data", source)
    _check_eight(call, "vals", wanted, source)
    call.same_size(out, ("data", source))
    same_dtype(call, "data", source.dtype, out.dtype)
    if index is not None:
        _check_eight(call, "dst_idx", index, source)
        _check_index_type(call, "dst_idx", index)
    filler = to_dtype(np.asarray(constant_f32(imm, call.op, "imm")), out.dtype, call.options, call.op, "imm")
    if call.options.arithmetic:
        order = range(hardware.MAX8 - 1, -1, -1)
        places = _places(call, _rows(call, "data", source), _rows(call, "vals", wanted), order)
        replaced = source.array().reshape(source.shape[0], -1).copy()
        np.put_along_axis(replaced, places, filler, axis=1)
        out.array()[...] = replaced.reshape(out.shape)
        if index is not None:
            index.array()[...] = places.astype(index.dtype.numpy).reshape(index.shape)
    call.finish(Engine.vector, free_elements(source))


def _rows(call: Call, role: str, tensor: Tensor) -> F32:
    """The elements as fp32 [partitions, elements]. Refuses NaN, whose order no page states."""
    values = call.f32(role, tensor).reshape(tensor.shape[0], -1)
    if np.isnan(values).any():
        call.refuse(rules.MAX8, role, "NaN among the elements")
    return values


def _places(call: Call, data: F32, wanted: F32, order: range) -> npt.NDArray[np.int64]:
    """For each of `wanted`, in `order`, its first place in `data` that no equal one took before, or else its first."""
    rows = np.arange(len(data))
    free = np.ones(data.shape, bool)
    places = np.empty(wanted.shape, np.int64)
    for column in order:
        equal = data == wanted[:, column : column + 1]
        if not equal.any(axis=1).all():
            row = int(np.argmin(equal.any(axis=1)))
            call.refuse(rules.MAX8, "vals", f"{float(wanted[row, column])!r} is not in data's partition {row}")
        matches = free & equal
        matches = np.where(matches.any(axis=1, keepdims=True), matches, equal)
        places[:, column] = matches.argmax(axis=1)
        free[rows, places[:, column]] = False
    return places


def _check_width(call: Call, role: str, tensor: Tensor) -> None:
    if not hardware.MAX8 <= free_elements(tensor) <= hardware.MAX8_ELEMENTS:
        call.refuse(rules.MAX8, role, f"{free_elements(tensor)} elements a partition")


def _check_eight(call: Call, role: str, tensor: Tensor, data: Tensor) -> None:
    if tensor.shape[0] != data.shape[0] or free_elements(tensor) != hardware.MAX8:
        call.refuse(rules.MAX8, role, f"shape {tensor.shape} for {data.shape[0]} partitions")


def _check_index_type(call: Call, role: str, tensor: Tensor) -> None:
    if tensor.dtype.name not in _INDEX_TYPES:
        call.refuse(rules.MAX8, role, f"{tensor.dtype}, must be uint16 or uint32")

"""Which tensors are written in the kernels' order, and under which names the output then holds them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.files.bands import BandedWeight
from deepinfer_prep.files.checkpoint import Checkpoint, read_index, read_json
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.files.segments import SEGMENT_BYTES
from deepinfer_prep.files.source_files import OtherFile
from deepinfer_prep.files.untrusted import INDEX
from deepinfer_prep.kernel_scale import Derived, PlannedWeight, Stored, fits_block128, is_outside_kernels
from deepinfer_prep.naming import INDEX_SUFFIX, LAID_OUT_SUFFIX
from deepinfer_prep.quantized import FLOAT_DTYPES

LAID_OUT_DTYPE = "U8"
"""Bytes in the kernels' order are no fp8 values in their places, and are not declared as such."""


def choose_laid_out(checkpoint: Checkpoint, weights: Collection[PlannedWeight]) -> dict[str, BandedWeight]:
    """The weights that a GEMM kernel takes for certain, as headers tell, and the scales of fp4 ones."""
    chosen = {
        quantized.weight: BandedWeight(checkpoint.tensors[quantized.weight].shape, quantized.element)
        for weight in weights
        for quantized in (weight.quantized,)
        if _is_taken(checkpoint.tensors[quantized.weight], weight)
    }
    return chosen | dict(_scales(checkpoint, weights, chosen))


def _scales(
    checkpoint: Checkpoint, weights: Collection[PlannedWeight], chosen: Mapping[str, BandedWeight]
) -> Iterator[tuple[str, BandedWeight]]:
    """The kernels' scales of fp4 weights: each lies in the bands of its weight, which has to be the only one."""
    users = Counter(weight.quantized.scale for weight in weights)
    for weight in weights:
        name = weight.quantized.scale
        is_kernel_scale = weight.quantized.element == "e2m1" and isinstance(weight.kernel_scale, Stored)
        if is_kernel_scale and weight.quantized.weight in chosen and users[name] == 1:
            yield name, BandedWeight(checkpoint.tensors[name].shape, "e8m0")


def _is_taken(tensor: TensorInfo, weight: PlannedWeight) -> bool:
    element, kernel_scale = weight.quantized.element, weight.kernel_scale
    if len(tensor.shape) not in (2, 3) or tensor.nbytes == 0 or is_outside_kernels(tensor, element):
        return False
    if BandedWeight(tensor.shape, element).largest_band_bytes > SEGMENT_BYTES:
        return False
    if isinstance(kernel_scale, Stored):
        return True
    if not isinstance(kernel_scale, Derived):
        return False
    return not kernel_scale.conditions or (kernel_scale.scale_dtype in FLOAT_DTYPES and fits_block128(kernel_scale))


def output_tensors(tensors: Iterable[TensorInfo], laid_out: Mapping[str, BandedWeight]) -> tuple[TensorInfo, ...]:
    """The tensors of a shard as the output's header names them."""
    return tuple(
        tensor._replace(name=tensor.name + LAID_OUT_SUFFIX, dtype=LAID_OUT_DTYPE) if tensor.name in laid_out else tensor
        for tensor in tensors
    )


def new_index(other: OtherFile, laid_out: Mapping[str, BandedWeight]) -> bytes:
    """The text of an index that names weights as the output does; empty where it stays as it is."""
    if not laid_out or "/" in other.name or not other.name.endswith(INDEX_SUFFIX):
        return b""
    try:
        weight_map = read_index(other.path)
    except CheckpointError:
        return b""  # It is copied along with the other files, whatever it says.
    if not laid_out.keys() & weight_map.keys():
        return b""
    index = {**read_json(other.path, INDEX), "weight_map": dict(_renamed(weight_map, laid_out))}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def _renamed(weight_map: Mapping[str, str], laid_out: Mapping[str, BandedWeight]) -> Iterator[tuple[str, str]]:
    for name, file in weight_map.items():
        yield (name + LAID_OUT_SUFFIX if name in laid_out else name), file

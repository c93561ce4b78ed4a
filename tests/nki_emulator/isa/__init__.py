"""The names of nki.isa. Anything else that is looked up here is refused by name."""

from __future__ import annotations

from typing import NoReturn

from .. import rules
from ..call import Engine as engine  # noqa: N813 - NKI's own spelling
from ..context import refuse_name
from ..registers import VirtualRegister
from .control import DmaEngine as dma_engine  # noqa: N813
from .control import NcVersion as nc_version  # noqa: N813
from .control import (
    core_barrier,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
    sendrecv,
)
from .elementwise import reciprocal, scalar_tensor_tensor, tensor_scalar, tensor_tensor
from .matmul import PerfMode as matmul_perf_mode  # noqa: N813
from .matmul import nc_matmul, nc_transpose
from .movement import DgeMode as dge_mode  # noqa: N813
from .movement import OobMode as oob_mode  # noqa: N813
from .movement import dma_copy, dma_transpose, memset, tensor_copy
from .reduction import ReduceCmd as reduce_cmd  # noqa: N813
from .reduction import activation, activation_reduce, tensor_reduce, tensor_scalar_reduce
from .search import max8, nc_find_index8, nc_match_replace8
from .selection import (
    affine_select,
    iota,
    local_gather,
    nc_stream_shuffle,
    range_select,
    select_reduce,
    tensor_copy_predicated,
)  # fmt: skip
from .statistics import bn_aggr, bn_stats, tensor_tensor_scan

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown
"""Older names of the engines."""

_TRN3 = ("nc_matmul_mx", "quantize_mx", "activate2", "exponential", "topk")


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    refuse_name(rules.TRN2_ONLY if name in _TRN3 else rules.NOT_MODELLED, "nisa", name)


__all__ = [
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "unknown_engine",
    "vector_engine",
]  # fmt: skip

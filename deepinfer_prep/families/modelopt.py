"""ModelOpt (TensorRT Model Optimizer): `x.weight` with `x.weight_scale`, or `x.weight_scale_inv` for blocks.

`quant_algo`, in config.json or in hf_quant_config.json, says how scales lie: FP8 (one value), FP8_PB_WO
(128x128 blocks, the scale [n/128, k/128] or [n/128, 1, k/128, 1]), FP8_PER_CHANNEL_PER_TOKEN (one a row),
MXFP8 (e8m0 exponents as U8, 1x32). Under MIXED_PRECISION `quantized_layers` says it module by module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_prep.families.block_size import Blocks, fits, grid_problem, not_a_matrix, per_tensor
from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout, Unpaired
from deepinfer_prep.families.quantization_config import Block, side_file
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import QuantizedWeight, grid_shape

_NAME = "modelopt"
_MIXED = "MIXED_PRECISION"
_SUFFIXES = ("_scale", "_scale_inv")
_GRIDS: Mapping[str, Block] = {"FP8_PB_WO": (128, 128), "MXFP8": (1, 32)}


def layout(checkpoint: Checkpoint) -> Layout | None:
    """Recognise a checkpoint by `quant_method: modelopt` in config.json, or by hf_quant_config.json."""
    config = _config(checkpoint)
    if config is None:
        return None
    weights: list[QuantizedWeight] = []
    unpaired: dict[str, Unpaired] = {}
    for suffix in _SUFFIXES:
        pairs = pair_weights(
            checkpoint,
            lambda name, suffix=suffix: appended(name, suffix),  # type: ignore[misc]
            lambda weight, scale: _blocks(weight, scale, _algorithm(config, weight.name)),
            has_exponents=lambda name: _algorithm(config, name) == "MXFP8",
        )
        weights += pairs.weights
        unpaired |= pairs.unpaired
    return Layout(_NAME, tuple(weights), unpaired)


def _config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    if str(checkpoint.quantization.get("quant_method", "")).startswith("modelopt"):
        return checkpoint.quantization
    own = side_file(checkpoint, "hf_quant_config.json").get("quantization")
    return own if isinstance(own, dict) and "quant_algo" in own else None


def _algorithm(config: Mapping[str, Any], weight: str) -> str:
    """The algorithm of a weight's module, under MIXED_PRECISION its own or its nearest parent's; "" if not stated."""
    algorithm = config.get("quant_algo")
    if algorithm != _MIXED:
        return str(algorithm or "")
    layers = config.get("quantized_layers")
    module = weight
    while module and isinstance(layers, dict):
        entry = layers.get(module)
        if isinstance(entry, dict):
            return str(entry.get("quant_algo", ""))
        module = module.rpartition(".")[0]
    return ""


def _blocks(weight: TensorInfo, scale: TensorInfo, algorithm: str) -> Blocks:
    if len(weight.shape) < 2:
        return not_a_matrix(weight)
    rows, columns = weight.shape[-2:]
    block = _GRIDS.get(algorithm)
    if block is not None:
        grid = grid_shape(rows, columns, block)
        is_spread = scale.shape == (*weight.shape[:-2], grid[0], 1, grid[1], 1)
        is_fitting = is_spread or fits(weight, scale, "e4m3", block)
        return Blocks(block) if is_fitting else Blocks(None, grid_problem(weight, scale, "e4m3", block))
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" and scale.shape in (weight.shape[:-1], (*weight.shape[:-1], 1)):
        return Blocks((1, max(1, columns)))
    whole = per_tensor(weight, scale) if algorithm in ("FP8", "") else None
    return whole or Blocks(
        None,
        f"quant_algo {algorithm or 'is not stated and'!r} does not explain a scale of the shape {list(scale.shape)}",
    )

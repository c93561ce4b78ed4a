"""Quark (AMD): `x.weight` with `x.weight_scale`; the config says per tensor, per channel or per group.

`global_quant_config.weight` is the rule and `layer_quant_config` holds exceptions by name pattern
(shell-style); each `weight` states `dtype`, `qscheme`, `ch_axis`, `group_size` and `scale_format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from deepinfer_prep.families.block_size import Blocks, fits, grid_problem, not_a_matrix, per_tensor
from deepinfer_prep.families.pairing import appended, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo

_NAME = "quark"


def layout(checkpoint: Checkpoint) -> Layout | None:
    """Recognise a checkpoint by its config's `quant_method`: the tensor names occur in other families as well."""
    config = checkpoint.quantization
    if config.get("quant_method") != _NAME:
        return None
    pairs = pair_weights(
        checkpoint,
        lambda name: appended(name, "_scale"),
        lambda weight, scale: _blocks(weight, scale, _scheme_of(weight.name, config)),
        has_exponents=lambda name: _scheme_of(name, config).get("scale_format") == "e8m0",
    )
    return Layout(_NAME, pairs.weights, pairs.unpaired)


def _scheme_of(weight: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `weight` entry that covers a module; empty where none does, or where it is a list of several."""
    module = weight.rpartition(".")[0]
    layers = config.get("layer_quant_config")
    exceptions = layers.items() if isinstance(layers, dict) else ()
    chosen = next((entry for pattern, entry in exceptions if fnmatchcase(module, pattern)), None)
    entry = chosen if chosen is not None else config.get("global_quant_config")
    scheme = entry.get("weight") if isinstance(entry, dict) else None
    return scheme if isinstance(scheme, dict) else {}


def _blocks(weight: TensorInfo, scale: TensorInfo, scheme: Mapping[str, Any]) -> Blocks:
    if len(weight.shape) < 2:
        return not_a_matrix(weight)
    kind, group = scheme.get("qscheme"), scheme.get("group_size")
    if kind == "per_tensor":
        return per_tensor(weight, scale) or Blocks(None, _unlike("one value", scale))
    if kind == "per_channel" and scheme.get("ch_axis") in (0, None):
        is_fitting = scale.shape in (weight.shape[:-1], (*weight.shape[:-1], 1))
        return Blocks((1, max(1, weight.shape[-1]))) if is_fitting else Blocks(None, _unlike("one value a row", scale))
    if kind == "per_group" and type(group) is int and group > 0:
        block = (1, group)
        return Blocks(block) if fits(weight, scale, "e4m3", block) else _unfit(weight, scale, block)
    return Blocks(None, f"the config's qscheme {kind!r} does not say which rows and columns a scale covers")


def _unfit(weight: TensorInfo, scale: TensorInfo, block: tuple[int, int]) -> Blocks:
    return Blocks(None, grid_problem(weight, scale, "e4m3", block))


def _unlike(expected: str, scale: TensorInfo) -> str:
    return f"the config says {expected}, but the scale has the shape {list(scale.shape)}"

"""Finds the static scales of e4m3 activations and of an fp8 KV cache, whichever quantizer wrote them.

Of a module whose weight is halved: `input_scale` (ModelOpt, compressed-tensors, Quark, AutoFP8), `activation_scale`
(transformers), `act_scale` and `output_scale` (older AutoFP8), `scale_input` (ComfyUI), `qscale_act` (Mistral),
`activation_scaling_factor` (TensorRT-LLM); joined to a stacked weight's name by an underscore. Of the cache and of fp8
attention: `k_scale`, `v_scale`, `q_scale`, `kv_scale`, `prob_scale`, and what vLLM maps to them (`k_proj.output_scale`,
`prob_output_scale`), `kv_cache_scaling_factor`. `input_scale_ub` is an upper bound and no scale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import FLOAT_DTYPES, QuantizedWeight

_OF_A_MODULE = (
    *("input_scale", "activation_scale", "act_scale", "output_scale", "scale_input", "scale_output", "qscale_act"),
    *("activation_scaling_factor", "input_scaling_factor", "act_scaling_factor", "output_scaling_factor"),
    *("input_activation_scale", "a_scale"),
)
_CACHE = re.compile(
    r"(?:(?:q|k|v|kv|qkv|prob)(?:_proj)?(?:_cache)?(?:_output)?_(?:scale|scaling_factor)"
    r"|(?:q|k|v|kv|qkv)_proj\.output_scale|[a-z]+_fake_quantizer\.qscale_act)"
)
_OTHER_CACHE = re.compile(r"int|fp4|e2m1|\"num_bits\": [1-7]\b")
_FP8_CACHE = re.compile(r"fp8|float|e4m3|static")


def find_activation_scales(
    checkpoint: Checkpoint, quantization: Quantization, weights: Iterable[QuantizedWeight]
) -> tuple[str, ...]:
    """The static scales that --activation-scales doubles: those of e4m3 activations and of an fp8 cache.

    A scale of an integer or fp4 activation, or of a module whose weight is not halved, is none of them.
    """
    weights = tuple(weights)
    halved = {weight.weight for weight in weights if weight.element == "e4m3"}
    modules = halved | {name.rpartition(".")[0] for name in halved}
    scales = {weight.scale for weight in weights}
    stated = stated_cache(quantization)
    has_fp8_cache = bool(halved) if stated is None else stated
    return tuple(
        name
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(("_scale", "_scaling_factor", "scale_input", "scale_output", "qscale_act"))
        and tensor.dtype in FLOAT_DTYPES
        and name not in scales
        and (has_fp8_cache if is_of_cache(name) else not modules.isdisjoint(_stems(name)))
    )


def is_of_cache(name: str) -> bool:
    """Whether a name is that of a scale of the KV cache or of fp8 attention."""
    parts = name.rsplit(".", 2)
    return any(_CACHE.fullmatch(".".join(parts[-count:])) for count in (1, 2))


def looks_static(name: str) -> bool:
    """Whether a name is that of a static scale of an activation or of a cache, of whatever type."""
    return is_of_cache(name) or name.endswith(tuple(f"{mark}{suffix}" for suffix in _OF_A_MODULE for mark in "._"))


def stated_cache(quantization: Quantization) -> bool | None:
    """Whether the configs say that the KV cache is fp8; None where they say nothing of it."""
    for config in quantization.configs:
        for key, value in config.values.items():
            if value and ("kv_cache" in key or "kv_quant" in key or key == "cache_config"):
                text = json.dumps(value, default=str).lower()
                if _OTHER_CACHE.search(text):
                    return False
                if _FP8_CACHE.search(text):
                    return True
    return None


def _stems(name: str) -> Iterator[str]:
    """The modules and stacked weights that a name may be a static scale of.

    "x.input_scale" is of "x", and "x.experts.w13_input_scale" of "x.experts.w13" or "x.experts.w13_weight".
    """
    for suffix in _OF_A_MODULE:
        if name.endswith(("." + suffix, "_" + suffix)):
            stem = name[: -len(suffix) - 1]
            yield from (stem, f"{stem}_weight")

"""Finds the static scales of activations and of the KV cache, whichever quantizer wrote them.

`input_scale` (ModelOpt, compressed-tensors, Quark, AutoFP8), `activation_scale` (transformers), `act_scale`
and `output_scale` (older AutoFP8), `scale_input` (ComfyUI) lie in a module that holds fp8, or are joined to a
stacked weight's name by an underscore. `k_scale`, `v_scale`, `q_scale`, `kv_scale`, `prob_scale` (of fp8
attention) and Mistral's `qscale_act` stand for themselves. `input_scale_ub` is an upper bound and no scale.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_prep.families.protocol import fp8_names
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import FLOAT_DTYPES, QuantizedWeight

_OF_A_MODULE = ("input_scale", "activation_scale", "act_scale", "output_scale", "scale_input")
_ALONE = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "qscale_act")


def find_activation_scales(checkpoint: Checkpoint, weights: Iterable[QuantizedWeight]) -> tuple[str, ...]:
    """Every static scale of an fp8 activation; scales of integer activations and caches are left out."""
    names = fp8_names(checkpoint)
    modules = {name.rpartition(".")[0] for name in names} | set(names)
    scales = {weight.scale for weight in weights}
    alone = () if _has_integer_cache(checkpoint) else _ALONE
    return tuple(
        name
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(("_scale", "scale_input", "qscale_act"))
        and tensor.dtype in FLOAT_DTYPES
        and name not in scales
        and (name.rpartition(".")[2] in alone or _is_beside(name, modules))
    )


def _is_beside(name: str, modules: set[str]) -> bool:
    """Whether a name is `x.input_scale` and the like, x being a module or a parameter in fp8."""
    for suffix in _OF_A_MODULE:
        if name.endswith(("." + suffix, "_" + suffix)):
            stem = name[: -len(suffix) - 1]
            return stem in modules or stem + "_weight" in modules
    return False


def _has_integer_cache(checkpoint: Checkpoint) -> bool:
    scheme = checkpoint.quantization.get("kv_cache_scheme")
    return isinstance(scheme, dict) and scheme.get("type") == "int"

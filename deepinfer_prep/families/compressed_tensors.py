"""compressed-tensors (llm-compressor): `x.weight` with `x.weight_scale`; the config says how scales lie.

`quantization_config.config_groups` holds one scheme or several; each has `targets` (module names, `re:` patterns or
module classes) and `weights` with `strategy`: tensor, channel, block (`block_structure`) or group (`group_size`; with
`scale_dtype` torch.uint8 the bytes are e8m0 exponents). Packed integers and fp4 (`weight_packed`) hold no fp8 weight.
Sparse weights keep the values that are not zero in `x.compressed`, and where these lie in `x.bitmask`, which is copied.
"""

from __future__ import annotations

from deepinfer_prep.families.pairing import appended, beside, pair_weights
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import FP8_DTYPE

_NAME = "compressed-tensors"
_SPARSE = "a sparse weight holds only the values that are not zero, which no kernel here takes"


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise a checkpoint by its config's `quant_method`: the tensor names occur in other families as well."""
    if not quantization.has_method(_NAME):
        return None
    pairs = pair_weights(checkpoint, quantization, lambda name: appended(name, "_scale"))
    sparse = pair_weights(checkpoint, quantization, _scales_of_sparse, no_kernel_scale=_SPARSE)
    return Layout(
        _NAME,
        (*pairs.weights, *sparse.weights),
        {**pairs.unpaired, **sparse.unpaired},
        warnings=_packed_warning(checkpoint, quantization),
    )


def _scales_of_sparse(name: str) -> tuple[str, ...]:
    return (beside(name, "weight_scale"),) if name.rpartition(".")[2] == "compressed" else ()


def _packed_warning(checkpoint: Checkpoint, quantization: Quantization) -> tuple[str, ...]:
    packed = (name for name in checkpoint.tensors if name.endswith(".weight_packed"))
    scales = {name: checkpoint.tensors.get(beside(name, "weight_scale")) for name in packed}
    names = [name for name, scale in scales.items() if scale is None or scale.dtype != FP8_DTYPE]
    if not names:
        return ()
    (kind, *_) = [*quantization.values_of("format"), "packed"]
    return (
        f"{len(names):,} weights are stored in fewer than eight bits ({kind}), {names[0]} among them. Nothing in them "
        "is e4m3: they and their scales are copied as they are.",
    )

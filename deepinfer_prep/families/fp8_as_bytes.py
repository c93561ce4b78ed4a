"""fp8 weights whose header says U8 or I8: another program wrote the bytes without their dtype.

MLX reads F8_E4M3 as bytes and writes U8; Transformer Engine keeps `x._data` as bytes. Copying them as integers would
leave their codes above 240 as they are, in an output that says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_prep.errors import list_some
from deepinfer_prep.families.block_size import explain, fits
from deepinfer_prep.families.pairing import appended, beside
from deepinfer_prep.families.protocol import Layout, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo
from deepinfer_prep.quantized import EXPONENT_DTYPES, FLOAT_DTYPES

_NAME = "fp8-as-bytes"
_BYTES = ("U8", "I8")
_WIDE_DTYPES = frozenset({*FLOAT_DTYPES, "I64", "I32", "BOOL"})
_SCALES = ("weight_scale", "weight_scale_inv", "scale", "scale_inv", "_scale_inv", "_scale", "qscale_weight")
_MOST_NAMES = 5


def layout(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """Recognise weights in U8 or I8 that have a scale and that the config calls fp8; they are refused."""
    has_fp8 = bool(fp8_names(checkpoint))
    # Bytes beside an fp8 tensor are something else of its module, such as the bitmask of a sparse weight.
    modules = {name.rpartition(".")[0] for name in fp8_names(checkpoint)}
    names = [
        name
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype in _BYTES and len(tensor.shape) >= 2 and quantization.is_fp8(name)
        if "." not in name or name.rpartition(".")[0] not in modules
        if any(_is_fp8(quantization, tensor, scale, has_fp8) for scale in _scales(checkpoint, name))
    ]
    if not names:
        return _dequantized(checkpoint, quantization)
    refusal = (
        f"{len(names):,} tensors have the dtype {checkpoint.tensors[names[0]].dtype}, but the config calls them fp8 "
        f"and each has a scale: {list_some(names, _MOST_NAMES, checkpoint.where)}. Another program has stored fp8 "
        "codes as plain bytes. Use the original checkpoint, or save these tensors as F8_E4M3 "
        "(`tensor.view(torch.float8_e4m3fn)`)."
    )
    return Layout(_NAME, refusals=(refusal,))


def _dequantized(checkpoint: Checkpoint, quantization: Quantization) -> Layout | None:
    """What is to be said of a checkpoint in wide floats alone whose config still says fp8."""
    tensors = checkpoint.tensors.values()
    if not tensors or any(tensor.dtype not in _WIDE_DTYPES for tensor in tensors):
        return None
    stale = next((tensor.name for tensor in tensors if len(tensor.shape) > 1 and quantization.is_fp8(tensor.name)), "")
    if not stale:
        return None
    warning = (
        f"the config says fp8, but no tensor is: {checkpoint.where(stale)} is {checkpoint.tensors[stale].dtype}. The "
        "weights were dequantized and the config was not changed with them; readers that believe it would be wrong."
    )
    return Layout(_NAME, warnings=(warning,))


def _scales(checkpoint: Checkpoint, name: str) -> Iterator[TensorInfo]:
    base = name.removesuffix("._data").removesuffix("_data")
    names = [*appended(base, "_scale", "_scale_inv"), *(f"{base}{mark}_scale_inv" for mark in ("", "."))]
    names += [beside(name, last) for last in (*_SCALES, "weights_scaling_factor", "scale_weight")]
    yield from (checkpoint.tensors[found] for found in dict.fromkeys(names) if found in checkpoint.tensors)


def _is_fp8(quantization: Quantization, weight: TensorInfo, scale: TensorInfo, has_fp8: bool) -> bool:
    """Whether a scale is that of eight-bit values. Packed four-bit values have twice as many columns as bytes."""
    if scale.dtype not in FLOAT_DTYPES | EXPONENT_DTYPES or scale.name == weight.name:
        return False
    if scale.dtype in EXPONENT_DTYPES and fits(weight, scale, "e2m1", (1, 32)):
        return False
    if not has_fp8:
        return True
    # Beside weights that do have the dtype, I8 is int8 and U8 may be packed.
    is_explained = explain(weight, scale, quantization.schemes(weight.name)).size is not None
    return weight.dtype == "U8" and is_explained

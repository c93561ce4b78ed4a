"""Formats in which nothing is e4m3: F8_E5M2 and gpt-oss's MXFP4. They are copied as they are, and the user is told.

Trainium2 computes with e5m2 as OCP defines it. MXFP4 experts are `x_blocks` (U8, two e2m1 values a byte) with
`x_scales` (U8, e8m0).
"""

from __future__ import annotations

from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.files.checkpoint import Checkpoint

_BLOCKS, _SCALES = "_blocks", "_scales"


def e5m2_layout(checkpoint: Checkpoint, _: Quantization) -> Layout | None:
    """Recognise tensors of the header dtype F8_E5M2, which occur most often in diffusion models."""
    names = [name for name, tensor in checkpoint.tensors.items() if tensor.dtype == "F8_E5M2"]
    if not names:
        return None
    warning = (
        f"{len(names):,} tensors are F8_E5M2, {names[0]} among them. The hardware reads e5m2 as the checkpoint "
        "means it: they are copied as they are."
    )
    return Layout("e5m2", warnings=(warning,))


def mxfp4_layout(checkpoint: Checkpoint, _: Quantization) -> Layout | None:
    """Recognise experts in MXFP4 by a U8 tensor `x_blocks` with a U8 tensor `x_scales`."""
    names = [name for name in checkpoint.tensors if _is_mxfp4(checkpoint, name)]
    if not names:
        return None
    warning = (
        f"{len(names):,} weights are stored in MXFP4, {names[0]} among them. Nothing in them is e4m3: they and "
        "their scales are copied as they are."
    )
    return Layout("mxfp4", warnings=(warning,))


def _is_mxfp4(checkpoint: Checkpoint, name: str) -> bool:
    if not name.endswith(_BLOCKS) or checkpoint.tensors[name].dtype != "U8":
        return False
    scales = checkpoint.tensors.get(name.removesuffix(_BLOCKS) + _SCALES)
    return scales is not None and scales.dtype == "U8"

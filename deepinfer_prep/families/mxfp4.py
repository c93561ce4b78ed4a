"""gpt-oss: MXFP4 experts, `x_blocks` (U8, two e2m1 values a byte) with `x_scales` (U8, e8m0). Nothing to halve."""

from __future__ import annotations

from deepinfer_prep.families.protocol import Family, Layout
from deepinfer_prep.files.checkpoint import Checkpoint

_BLOCKS, _SCALES = "_blocks", "_scales"


class MXFP4:
    """Checkpoints with MXFP4 experts."""

    name = "mxfp4"

    def layout(self, checkpoint: Checkpoint) -> Layout | None:
        """U8 `_blocks` with U8 `_scales`; they are copied, and that is said."""
        names = [name for name in checkpoint.tensors if _is_packed(checkpoint, name)]
        if not names:
            return None
        warning = (
            f"{len(names):,} weights are stored in MXFP4, {names[0]} among them. Nothing in them is e4m3: they and "
            "their scales are copied as they are."
        )
        return Layout(self.name, warnings=(warning,))


def _is_packed(checkpoint: Checkpoint, name: str) -> bool:
    if not name.endswith(_BLOCKS) or checkpoint.tensors[name].dtype != "U8":
        return False
    scales = checkpoint.tensors.get(name.removesuffix(_BLOCKS) + _SCALES)
    return scales is not None and scales.dtype == "U8"


FAMILY: Family = MXFP4()

"""The other eight-bit float, F8_E5M2: Trainium2 computes with it as OCP defines it, so nothing changes."""

from __future__ import annotations

from deepinfer_prep.families.protocol import Family, Layout
from deepinfer_prep.files.checkpoint import Checkpoint


class E5M2:
    """Tensors in e5m2, most often diffusion models."""

    name = "e5m2"

    def layout(self, checkpoint: Checkpoint) -> Layout | None:
        """Recognised by the header dtype; they are copied, and that is said."""
        names = [name for name, tensor in checkpoint.tensors.items() if tensor.dtype == "F8_E5M2"]
        if not names:
            return None
        warning = (
            f"{len(names):,} tensors are F8_E5M2, {names[0]} among them. The hardware reads e5m2 as the checkpoint "
            "means it: they are copied as they are."
        )
        return Layout(self.name, warnings=(warning,))


FAMILY: Family = E5M2()

"""What converting each family's checkpoint comes to, each converted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from deepinfer_prep import RefusedError, convert_checkpoint
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.manifest import Manifest, read_manifest
from deepinfer_prep.options import Options
from deepinfer_prep.planning.plan import Plan, plan_conversion
from tests.families.layouts import Layout, write_layout
from tests.families.raw import Stored, read_files

REFUSED = {
    "deepseek_v4_fp8_experts": "F8_E4M3 tensors that have no scale (2): 'mtp.0.e_proj.weight'",
    "llama_nvfp4": "block scales of packed 4-bit weights (NVFP4), not weights",
    "modelopt_nvfp4": "block scales of packed 4-bit weights (NVFP4), not weights",
    "modelopt_mixed": "block scales of packed 4-bit weights (NVFP4), not weights",
    "diffusion_cast": "none holds a code above 240: --unscaled copy-if-safe copies them exactly",
    "diffusion_cast_large": "F8_E4M3 tensors that have no scale (2): 'double_blocks.0.img_attn.qkv.weight'",
    "transformer_engine": "inside Transformer Engine's opaque `_extra_state`",
}
"""The checkpoints that are refused by default, with what the refusal has to say."""


@dataclass(frozen=True)
class Outcome:
    """A converted checkpoint, or the sentences of the refusal."""

    layout: Layout
    plan: Plan
    output: Path
    refusal: str

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.output)

    @cached_property
    def source_tensors(self) -> Mapping[str, Stored]:
        return self.layout.read()

    @cached_property
    def output_tensors(self) -> Mapping[str, Stored]:
        return self.layout.read(self.output)

    @cached_property
    def sidecar(self) -> Mapping[str, Stored]:
        return read_files(self.output, self.manifest.sidecar)


def convert_layout(name: str, folder: Path, options: Options | None = None) -> Outcome:
    """Write the named checkpoint below `folder` and convert it."""
    layout = write_layout(name, folder / "source")
    plan = plan_conversion(open_checkpoint(layout.folder), options or Options())
    output = folder / "output"
    try:
        convert_checkpoint(layout.folder, output, options=options, workers=1)
    except RefusedError as error:
        return Outcome(layout, plan, output, str(error))
    return Outcome(layout, plan, output, "")

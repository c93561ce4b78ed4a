"""The checkpoint that the tests of this folder convert, and how they convert it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result

from deepinfer_prep.cli.main import main
from tests.small_files import Tensor, tree, write_config, write_file, write_index

MANIFEST = "neuron_manifest.json"
WORKSPACE = ".deepinfer-prep"


def write_checkpoint(folder: Path, fill: int = 0x7E) -> Path:
    """Two shards with a scale apart from its weight, a matrix to split, an index, a config and a folder."""
    weight: Tensor = ("F8_E4M3", (64, 96), fill)
    matrix = np.linspace(-3, 3, 24 * 8, dtype=np.float32).tobytes()
    shards: dict[str, dict[str, Tensor]] = {
        "model-1.safetensors": {
            "layers.0.wq.weight": weight,
            "layers.0.hc_attn_fn": ("F32", (24, 8), matrix),
            "layers.1.wq.scale": ("F8_E8M0", (2, 3), 127),
        },
        "model-2.safetensors": {
            "layers.1.wq.weight": weight,
            "layers.0.wq.scale": ("F8_E8M0", (2, 3), 126),
            "norm.weight": ("BF16", (96,), 1),
        },
    }
    for shard, tensors in shards.items():
        write_file(folder / shard, tensors, {"format": "pt"})
    write_index(folder, {name: shard for shard, tensors in shards.items() for name in tensors})
    write_config(folder, quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0")
    (folder / "inference").mkdir(exist_ok=True)
    (folder / "inference" / "model.py").write_text("print('hello')\n")
    return folder


def convert(source: Path, output: Path, *options: str) -> Result:
    """Run the command in this process, with one thread so that its calls come in one order."""
    arguments = ["convert", str(source), str(output), "--workers", "1", "--quiet", *options]
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def published(output: Path) -> dict[str, bytes]:
    """Everything in an output but the workspace."""
    files = tree(output)
    return {name: files[name] for name in files if not name.startswith((WORKSPACE + "/", WORKSPACE + ".done/"))}

"""Weights of several families in one checkpoint, in any number and over any shards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_prep import convert_checkpoint, verify_checkpoint
from tests.families.builder import Builder, Package, Style
from tests.families.rules import Blocks, Rows, WholeTensor

Fill = Callable[[Builder, int], None]

POWER = Style(".weight_scale_inv", Blocks(32, 32), power_of_two=True)
PARTS: dict[str, Fill] = {
    "v4": lambda b, i: b.fp8(f"layers.{i}.attn.wq", 70, 96, style=Style(".scale", Blocks(32, 32), "F8_E8M0")),
    "fp4": lambda b, i: b.fp4(f"layers.{i}.ffn.experts.0.w1", 64, 64),
    "inverse": lambda b, i: b.fp8(f"model.layers.{i}.q_proj", 70, 96, style=POWER),
    "rows": lambda b, i: b.fp8(f"model.layers.{i}.k_proj", 33, 40, style=Style(".weight_scale", Rows(), "BF16")),
    "tensor": lambda b, i: b.fp8(
        f"model.layers.{i}.v_proj", 33, 40, style=Style(".weight_scale", WholeTensor(), "F16")
    ),
    "mistral": lambda b, i: b.fp8(f"layers.{i}.wo", 33, 40, style=Style(".qscale_weight", WholeTensor(), "BF16")),
    "comfy": lambda b, i: b.fp8(f"blocks.{i}.mlp", 33, 40, style=Style(".scale_weight", WholeTensor())),
    "shared": lambda b, i: b.fp8_shared(
        [f"table{i}.shards.{n}.weight" for n in range(3)],
        f"table{i}.weight_scale",
        9,
        16,
        style=Style("", WholeTensor(), "BF16"),
    ),
    "stacked": lambda b, i: b.fp8(
        f"layers.{i}.experts.up", 2, 40, 64, style=Style("_scale_inv", Blocks(32, 32), weight_suffix="")
    ),
    "plain": lambda b, i: [b.plain(dtype, f"p{i}.{dtype}.weight", 5, 7) for dtype in ("BF16", "F32", "F16")] and None,
    "integers": lambda b, i: b.integers("I32", f"q{i}.weight_packed", 99, 4, 4) and None,
    "static": lambda b, i: b.activation_scale(f"layers.{i}.k_scale"),
}


@settings(max_examples=20, deadline=None)
@given(
    parts=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=8),
    shards=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_any_mixture_of_families_over_any_shards(parts: list[str], shards: int, seed: int) -> None:
    """Each fp8 weight is halved once, each scale doubled once, whatever else lies in the checkpoint and wherever."""
    with tempfile.TemporaryDirectory() as folder:
        builder = Builder("mixture", seed)
        for position, part in enumerate(parts):
            PARTS[part](builder, position)
        files = tuple(f"s{number}.safetensors" for number in range(min(shards, len(builder.tensors))))
        package = Package({"quantization_config": {"weight_block_size": [32, 32]}}, files, scatter=True)
        layout = builder.finish(Path(folder) / "source", package)
        output = Path(folder) / "output"
        convert_checkpoint(layout.folder, output, workers=1)
        before, after = layout.read(), layout.read(output)
        weights, scales = {weight.name for weight in layout.weights}, set(layout.scales)
        for name, stored in before.items():
            if name in weights:
                halved = (stored.array.astype(np.float32) / 2).astype(ml_dtypes.float8_e4m3fn)
                assert after[name].data == halved.tobytes(), name
            elif name in scales or (weights and name in layout.activation_scales):
                np.testing.assert_array_equal(after[name].values, 2 * stored.values, name)
            else:
                assert after[name] == stored, name
        assert verify_checkpoint(output, source=layout.folder, workers=1).first == ()

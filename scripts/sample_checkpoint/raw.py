"""A checkpoint of a few kilobytes, written byte by byte: for runs that need it thousands of times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

CONFIG = {
    "model_type": "tiny",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*layers.*", "Linear"],
                "weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [32, 32]},
            }
        },
        "ignore": ["re:.*lm_head", "lm_head"],
    },
}


def write_tiny(folder: Path) -> Path:
    """One shard with two fp8 weights, their scales and a matrix to split, an index and a config."""
    scale = np.full(4, 0.25, np.float32).tobytes()
    tensors = {
        "layers.0.weight": ("F8_E4M3", [64, 64], bytes([0x7E, 0x7F, 0x03, 0x40]) * 1024),
        "layers.0.weight_scale": ("F32", [2, 2], scale),
        "layers.1.weight": ("F8_E4M3", [64, 64], bytes([0x30]) * 4096),
        "layers.1.weight_scale": ("F32", [2, 2], scale),
        "layers.0.hc_attn_fn": ("F32", [3, 5], np.linspace(-2, 2, 15, dtype=np.float32).tobytes()),
    }
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    index = {"metadata": {"total_size": len(body)}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder

"""Small checkpoints written byte by byte, also invalid ones, for tests that need a few tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_prep.quantized import DTYPES

Tensor = tuple[str, tuple[int, ...], "bytes | int"]
"""dtype, shape, and the raw bytes or one byte that fills the tensor."""

WEIGHT: Tensor = ("F8_E4M3", (64, 64), 0x7E)
SCALE: Tensor = ("F8_E8M0", (2, 2), 127)
ONE_F32 = np.float32(1).tobytes()


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Write a safetensors file with the tensors in the given order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    body = bytearray()
    for name, (dtype, shape, content) in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].bits // 8
        data = content if isinstance(content, bytes) else bytes([content]) * size
        assert len(data) == size, name
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + size]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int | None = None) -> None:
    """Write model.safetensors.index.json."""
    metadata = {} if total_size is None else {"total_size": total_size}
    index = {"metadata": metadata, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_config(folder: Path, **quantization: Any) -> None:
    """Write config.json with a quantization_config."""
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

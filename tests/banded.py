"""Weights in the kernels' order, put there byte by byte, and checkpoints that hold weights of many shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from deepinfer_prep.kernel_layout import bands
from tests.small_files import Tensor, write_file, write_index

U8 = np.typing.NDArray[np.uint8]


def in_kernel_order(stored: U8, element: str) -> U8:
    """A weight's bytes [.., rows, bytes of a row] in the kernels' order, in the same shape."""
    if stored.ndim == 3:
        return np.stack([in_kernel_order(matrix, element) for matrix in stored])
    codes = stored
    if element == "e2m1":
        high, low = stored >> 4, stored & 0x0F
        codes = (high & 8) << 4 | (low & 8) << 3 | (high & 7) << 3 | (low & 7)
    columns = [codes[band.first : band.end].T.reshape(-1) for band in bands(len(stored))]
    return np.concatenate(columns).reshape(stored.shape)


def weights(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], seed: int = 0, *, with_nan: bool = False
) -> dict[str, Tensor]:
    """Weights (element, shape in bytes) with random codes, and random scales of the kernels' form, as `x.weight`."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, (element, shape) in shapes.items():
        codes = random.integers(0, 256, shape, dtype=np.uint8)
        if element == "e4m3" and not with_nan:
            codes[(codes & 0x7F) == 0x7F] = 0x7E
        rows, columns = shape[-2:]
        grid = (*shape[:-2], -(-rows // 32), -(-columns // 32)) if element == "e4m3" else (*shape[:-1], columns // 16)
        scale = random.integers(100, 125, grid, dtype=np.uint8)
        dtype = "F8_E4M3" if element == "e4m3" else "I8"
        tensors[f"{name}.weight"] = (dtype, shape, codes.tobytes())
        tensors[f"{name}.scale"] = ("F8_E8M0", grid, scale.tobytes())
    return tensors


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> Path:
    """A DeepSeek-V4 checkpoint of these tensors, spread over shards in their order, with an index."""
    names = list(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        write_file(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    quantization = '{"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}'
    (folder / "config.json").write_text(f'{{"model_type": "deepseek_v4", "quantization_config": {quantization}}}')
    return folder

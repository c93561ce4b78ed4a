"""Prepared checkpoints for the loader's tests, made by the converter from sources written here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.manifest import read_manifest
from tests.small_files import Tensor, write_config, write_file


def random_bytes(count: int, seed: int) -> bytes:
    """Reproducible bytes; as e4m3fn codes they hold no NaN, and codes above 240."""
    codes = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return codes.tobytes()


def fp8(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A random e4m3fn weight."""
    return "F8_E4M3", shape, random_bytes(int(np.prod(shape)), seed)


def fp4(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A random packed fp4 weight."""
    return "I8", shape, random_bytes(int(np.prod(shape)), seed)


def e8m0(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random e8m0 scales of a plausible size, that can be doubled."""
    values = np.random.default_rng(seed + 1).integers(100, 122, int(np.prod(shape)), dtype=np.uint8)
    return "F8_E8M0", shape, values.tobytes()


def f32(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random float32 values."""
    values = np.random.default_rng(seed + 2).standard_normal(int(np.prod(shape))).astype(np.float32)
    return "F32", shape, values.tobytes()


def bf16(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random bfloat16 values."""
    bits = np.random.default_rng(seed + 3).standard_normal(int(np.prod(shape))).astype(np.float32).view(np.uint32)
    return "BF16", shape, (bits >> 16).astype(np.uint16).tobytes()


def prepare(folder: Path, tensors: Mapping[str, Tensor], block: tuple[int, int] = (32, 32), shards: int = 1) -> Path:
    """Write a source with `tensors` spread over files, convert it, and return the output."""
    source, output = folder / "source", folder / "output"
    source.mkdir(parents=True)
    write_config(source, quant_method="fp8", fmt="e4m3", weight_block_size=list(block), activation_scheme="dynamic")
    names = list(tensors)
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        write_file(source / f"model-{number + 1:05}-of-{shards:05}.safetensors", part, {"format": "pt"})
    convert_checkpoint(source, output)
    return output


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of an output, sidecar included, read with nothing but the format's definition."""
    dtypes = {
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "I64": torch.int64,
    }
    tensors = {}
    manifest = read_manifest(folder)
    for name in (*manifest.shards, *manifest.sidecar):
        raw = (folder / name).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        for key, entry in header.items():
            start, end = entry["data_offsets"]
            data = torch.tensor(list(raw[8 + size + start : 8 + size + end]), dtype=torch.uint8)
            tensors[key] = data.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = (one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (left, right))
    return torch.equal(*flat)

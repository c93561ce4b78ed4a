"""safetensors files as raw bytes, valid or broken on purpose, with no library between the test and the disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

NUMPY_TYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "F32": np.float32,
    "I64": np.int64,
    "F64": np.float64,
}
"""The NumPy type of each header dtype that the fixtures use."""


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file: header dtype, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, dtype: str, array: npt.ArrayLike) -> Stored:
        """An array rounded to `dtype` (to nearest, ties to even)."""
        converted = np.asarray(array).astype(NUMPY_TYPES[dtype])
        return cls(dtype, converted.shape, converted.tobytes())

    @property
    def array(self) -> npt.NDArray[Any]:
        """The stored values in the NumPy type of the dtype."""
        return np.frombuffer(self.data, NUMPY_TYPES[self.dtype]).reshape(self.shape)

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        """The stored bytes of a one-byte dtype, shaped as the tensor."""
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """The stored values as float64 (exact for every dtype but I64)."""
        return self.array.astype(np.float64)


def write_file(
    path: Path,
    tensors: Mapping[str, Stored],
    metadata: Mapping[str, str] | None = None,
    *,
    edit_header: Callable[[dict[str, Any]], None] | None = None,
    pad: int = 0,
    cut: int = 0,
) -> None:
    """Write one file in the given tensor order.

    `metadata` becomes `__metadata__` (none at all if None). `edit_header` may change the header's dictionary, `pad`
    appends zero bytes and `cut` drops bytes at the end: three ways to make a file that a reader must refuse.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, stored in tensors.items():
        start, end = end, end + len(stored.data)
        header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [start, end]}
    if edit_header:
        edit_header(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(stored.data for stored in tensors.values()) + bytes(pad)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body[: len(body) - cut])


def read_file(path: Path) -> dict[str, Stored]:
    """Every tensor of a valid file."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), content[start:end])
    return tensors


def read_files(folder: Path, files: Iterable[str]) -> dict[str, Stored]:
    """Every tensor of several files of a folder."""
    return {name: stored for file in files for name, stored in read_file(folder / file).items()}


def read_metadata(path: Path) -> dict[str, str] | None:
    """The `__metadata__` of a file, None where there is none."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    metadata: dict[str, str] | None = json.loads(content[8 : 8 + length]).get("__metadata__")
    return metadata


def write_index(path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, Stored]) -> None:
    """model.safetensors.index.json, `total_size` being the bytes of the tensors alone."""
    total = sum(len(stored.data) for stored in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    path.write_text(json.dumps(index, indent=2))

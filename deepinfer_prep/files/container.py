"""One safetensors file: parse and validate its header, and lay a new one out.

The format (https://github.com/huggingface/safetensors, README "Format"): an unsigned 64-bit little-endian
header length, a JSON object of that length, then the tensors' bytes, which tile the rest without holes.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from deepinfer_prep import fp8
from deepinfer_prep.errors import ContainerError
from deepinfer_prep.files.storage import Place, Readable, Reader, Readers, open_reader
from deepinfer_prep.files.untrusted import shorten, unique_keys
from deepinfer_prep.quantized import DTYPES

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

MOST_DIMENSIONS = 64
"""torch and NumPy have at most as many."""

PREFIX_BYTES = 8
_MAX_SIZE = 2**64
_MAX_DIGITS = len(str(_MAX_SIZE))
_ODD_NUMBER = re.compile(rb"-0|\d{%d}" % (_MAX_DIGITS + 1))
_FIELDS = {"dtype", "shape", "data_offsets"}


class TensorInfo(NamedTuple):
    """One tensor of a file; `start` and `end` are byte offsets from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.start

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


def tensor_position(tensors: Sequence[TensorInfo], offset: int) -> int:
    """The position, among tensors in the order of their bytes, of the one that holds a byte of the data section."""
    return bisect_right(tensors, offset, key=lambda tensor: tensor.start) - 1


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header: `tensors` are in the order of their bytes and tile the data section."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    data_start: int
    """Offset of the data section in the file: the length prefix and the JSON text."""
    digest: str
    """xxh3-128 of the JSON text, in hex."""

    @property
    def data_size(self) -> int:
        """Bytes of the data section."""
        return self.tensors[-1].end if self.tensors else 0


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor's bytes lie: a file, the offset of its data section, and the tensor's own offsets."""

    path: Path | Readable
    data_start: int
    tensor: TensorInfo


def read_stored(location: Location, start: int, stop: int, readers: Readers) -> fp8.U8:
    """The bytes start..stop of a tensor.

    Raises:
        PrepError, OSError: its file cannot be read.
    """
    buffer = np.empty(stop - start, dtype=np.uint8)
    readers.get(location.path).read_into(buffer.data, location.data_start + location.tensor.start + start)
    return buffer


def read_header(path: Place) -> Header:
    """Read and validate the header of a safetensors file; tensor data is not touched.

    Raises:
        ContainerError: the file breaks a rule of the format; the message names it and the rule.
        OSError: it cannot be opened or read.
    """
    with closing(open_reader(path)) as file:
        size = file.size()
        text = _read_header_text(file, size)
    return parse_header(text, size, str(path))


def parse_header(text: bytes | bytearray, file_size: int, path: str) -> Header:
    """Validate a header's JSON text against the rules of the format and the size of its file.

    Accepts what the safetensors library accepts, but for keys that occur twice, fields beyond the three of a
    tensor, and tensors or dtypes spelled as JSON arrays or objects: rewriting would have to guess or lose something.

    Raises:
        ContainerError: a rule is broken; `path` is named in the message.
    """
    entries = _parse_json(text, path)
    metadata = _check_metadata(entries.pop("__metadata__", None), path)
    tensors = [_parse_tensor(name, entry, path) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    data_start = PREFIX_BYTES + len(text)
    _check_tiling(tensors, file_size - data_start, data_start, path)
    return Header(tuple(tensors), metadata, data_start, xxhash.xxh3_128_hexdigest(text))


def encode_header(tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The length prefix and JSON text of a file with these tensors, padded so that data starts 8-aligned."""
    entries = [f'"__metadata__":{_encode_metadata(metadata)}'] if metadata else []
    # Formatted by hand: the json module takes four times as long, seconds for 100,000 tensors.
    entries += (
        f'{encode_basestring(tensor.name)}:{{"dtype":"{tensor.dtype}","shape":[{",".join(map(str, tensor.shape))}],'
        f'"data_offsets":[{tensor.start},{tensor.end}]}}'
        for tensor in tensors
    )
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def _encode_metadata(metadata: Mapping[str, str]) -> str:
    return json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=False)


def _read_header_text(file: Reader, size: int) -> bytearray:
    if size < PREFIX_BYTES:
        raise ContainerError(
            f"{file.place} is {size} bytes long, too short for a safetensors file: the download is not complete. "
            "Fetch it again.",
            code="truncated-file",
        )
    prefix = bytearray(min(size, 64))
    file.read_into(memoryview(prefix), 0)
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if not 0 < length <= min(size - PREFIX_BYTES, MAX_HEADER_BYTES):
        raise ContainerError(f"{file.place} {_explain_bad_length(bytes(prefix), length, size)}")
    text = bytearray(length)
    file.read_into(memoryview(text), PREFIX_BYTES)
    return text


LFS_START = b"version https://git-lfs"

_FOREIGN_STARTS = {
    LFS_START: "is a Git LFS pointer: the real file was not downloaded. Run `git lfs pull` in the "
    "checkpoint's folder, or fetch the file again.",
    b"<": "is an HTML or XML page, not a safetensors file: the download returned an error page. Fetch it again.",
    b"{": "is JSON text, not a safetensors file: the download may have returned an error message. Fetch it again.",
    b"GGUF": "is a GGUF file, not a safetensors file. Give the checkpoint in safetensors form.",
    b"PK\x03\x04": "is a zip archive, as torch.save writes it, not a safetensors file. Give the checkpoint in "
    "safetensors form.",
    bytes(PREFIX_BYTES): "begins with zeros where a safetensors file states the length of its header: the download "
    "reserved the space but is not complete. Fetch it again.",
}
"""How files begin that are often found under a shard's name, and what to say of them."""


def _explain_bad_length(start: bytes, length: int, size: int) -> str:
    for foreign, explanation in _FOREIGN_STARTS.items():
        if start.lstrip(b" \t\r\n").startswith(foreign):
            return explanation
    if length > MAX_HEADER_BYTES:
        return (
            f"is not a safetensors file: its first 8 bytes give a header of {length:,} bytes, above the format's "
            f"limit of {MAX_HEADER_BYTES:,}. It may be another format or a damaged download."
        )
    return (
        f"is cut off inside its header: expected at least {PREFIX_BYTES + length:,} bytes, found {size:,}. "
        "Fetch it again."
    )


def _parse_json(text: bytes | bytearray, path: str) -> dict[str, Any]:
    # A hook for each number takes a third of the time, and what it is for seldom occurs but as part of a name.
    parse_int = _parse_number if _ODD_NUMBER.search(text) else None
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise ContainerError(
            f"{path} has a header that is not valid JSON text ({error}). It is damaged or not a safetensors file."
        ) from None
    if not isinstance(entries, dict):
        raise ContainerError(f"{path} has a header that is not a JSON object. It is damaged or not a safetensors file.")
    return entries


def _parse_number(text: str) -> int | float:
    """Whole numbers as JSON readers of other languages see them: -0 and what exceeds 64 bits are floats."""
    return int(text) if text != "-0" and len(text) <= _MAX_DIGITS else float(text)


def _check_metadata(metadata: Any, path: str) -> Mapping[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ContainerError(f"{path} has a `__metadata__` that is not a map from text to text.")
    if not all(_is_text(part) for item in metadata.items() for part in item):
        raise ContainerError(f"{path} has a `__metadata__` with half a surrogate pair, which is no text.")
    return metadata


def _is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8: JSON escapes can smuggle in half a surrogate pair."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _parse_tensor(name: str, entry: Any, path: str) -> TensorInfo:
    if not _is_text(name):
        raise ContainerError(f"{path}: the tensor name {shorten(name)} holds half a surrogate pair, which is no text.")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ContainerError(
            f"{path}: tensor {shorten(name)} needs `dtype`, `shape` and `data_offsets` and nothing else; "
            f"found {shorten(entry)}."
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        raise ContainerError(
            f"{path}: tensor {shorten(name)} has the unknown dtype {shorten(dtype)}; known are {', '.join(DTYPES)}."
        )
    if not isinstance(shape, list) or not isinstance(offsets, list) or not _are_sizes(shape, offsets):
        raise ContainerError(
            f"{path}: tensor {shorten(name)} has a shape or offsets that are not whole numbers from 0 to 2^64 - 1: "
            f"shape {shorten(shape)}, offsets {shorten(offsets)}."
        )
    if len(shape) > MOST_DIMENSIONS:
        raise ContainerError(
            f"{path}: tensor {shorten(name)} has {len(shape):,} dimensions, more than the {MOST_DIMENSIONS} that any "
            "framework has. The file is damaged.",
            code="bad-header",
        )
    start, end = offsets
    size_bits = _checked_bits(shape, known.bits)
    if size_bits is None or size_bits % 8 or size_bits // 8 != end - start:
        takes = "more than 2^64 bits" if size_bits is None else f"{size_bits / 8:,.10g} bytes"
        raise ContainerError(
            f"{path}: tensor {shorten(name)} of dtype {dtype} and shape {shorten(shape)} takes {takes}, but its "
            f"offsets {start:,} to {end:,} give it {end - start:,} bytes."
        )
    return TensorInfo(name, dtype, tuple(shape), start, end)


def _are_sizes(shape: list[Any], offsets: list[Any]) -> bool:
    numbers = shape + offsets
    return len(offsets) == 2 and {*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < _MAX_SIZE


def _checked_bits(shape: Iterable[int], bits: int) -> int | None:
    """Bits of a tensor, or None where a partial product leaves 64 bits, as the library's arithmetic has it."""
    elements = 1
    for dimension in shape:
        elements *= dimension
        if elements >= _MAX_SIZE:
            return None
    return elements * bits if elements * bits < _MAX_SIZE else None


def _check_tiling(tensors: list[TensorInfo], data_size: int, data_start: int, path: str) -> None:
    position, before = 0, "the start of the data"
    for tensor in tensors:
        if tensor.start != position:
            what = "overlaps" if tensor.start < position else "leaves a hole after"
            raise ContainerError(
                f"{path}: tensor {tensor.name!r} starts at byte {tensor.start:,} and {what} {before}, which ends at "
                f"{position:,}. The file is damaged."
            )
        position, before = tensor.end, f"tensor {tensor.name!r}"
    if position != data_size:
        expected, found = data_start + position, data_start + data_size
        difference = (
            f"{expected - found:,} bytes missing" if found < expected else f"{found - expected:,} bytes too many"
        )
        raise ContainerError(
            f"{path}: expected {expected:,} bytes, found {found:,}: {difference}. "
            "The download or copy is not complete, or another program wrote to the file. Fetch it again.",
            code="wrong-file-size",
        )

"""Where each tensor lies: shards, headers and byte offsets, all known before a value is made."""

from __future__ import annotations

import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from .table import Entry, Tensor

_DTYPE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")
"""The order in which safetensors' own writer stores these dtypes; names decide among equals."""


@dataclass(frozen=True)
class Shard:
    """One output file: its name, its header (8-byte length included) and each tensor's absolute byte offset."""

    filename: str
    header: bytes
    offsets: dict[str, int]
    size: int


def plan_shards(entries: Sequence[Entry], count: int) -> list[Shard]:
    """Cut the tensors into `count` files of about equal size.

    With four or more files, each engram table has a file of its own at the end, as in the released checkpoint. Every
    cut between the others falls between an e4m3 weight and its scale, so that some scales lie in the next file.
    """
    if count < 1:
        raise ValueError(f"{count} shards: at least one is needed")
    tables = sorted({_engram_prefix(entry) for entry in entries} - {""}) if count >= 4 else []
    tables.sort(key=lambda prefix: int(prefix.split(".")[1]))
    body = [entry for entry in entries if _engram_prefix(entry) not in tables]
    groups = _cut(body, count - len(tables))
    groups += [[t for e in entries if _engram_prefix(e) == prefix for t in e.tensors] for prefix in tables]
    return [
        lay_out(f"model-{number:05}-of-{count:05}.safetensors", group) for number, group in enumerate(groups, start=1)
    ]


def lay_out(filename: str, tensors: Iterable[Tensor]) -> Shard:
    """The file of these tensors as safetensors' own writer would lay it out."""
    ordered = sorted(tensors, key=lambda tensor: (_DTYPE_ORDER.index(tensor.dtype), tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    offsets = {tensor.name: base + header[tensor.name]["data_offsets"][0] for tensor in ordered}
    return Shard(filename, struct.pack("<Q", len(text)) + text, offsets, base + end)


def index_text(shards: Iterable[Shard], total_bytes: int) -> str:
    """model.safetensors.index.json: the file of each tensor, and the bytes of all tensors without the headers."""
    weight_map = {name: shard.filename for shard in shards for name in shard.offsets}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def _engram_prefix(entry: Entry) -> str:
    layer, found, _ = entry.name.partition(".engram.")
    return layer if found else ""


def _cut(entries: Sequence[Entry], count: int) -> list[list[Tensor]]:
    tensors = [tensor for entry in entries for tensor in entry.tensors]
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    allowed = [n + 1 for n, tensor in enumerate(tensors) if tensor.dtype == "F8_E4M3"]
    if count - 1 > len(allowed):
        raise ValueError(f"{count} shards need {count - 1} e4m3 weights to cut behind, found {len(allowed)}: use fewer")
    cuts = [0]
    for number in range(1, count):
        # Near its share of the bytes, but behind the previous cut and with enough places left for the next ones.
        wanted = bisect_left(allowed, number * ends[-1] / count, key=lambda cut: ends[cut - 1])
        earliest = bisect_right(allowed, cuts[-1])
        cuts.append(allowed[max(earliest, min(wanted, len(allowed) - (count - number)))])
    return [tensors[start:end] for start, end in pairwise([*cuts, len(tensors)])]

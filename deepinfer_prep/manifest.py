"""What a finished output says about itself: `neuron_manifest.json`, written last.

It is all that `verify` and the runtime need to know about names and formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_prep.errors import ManifestError
from deepinfer_prep.files.storage import Place
from deepinfer_prep.naming import MANIFEST_NAME
from deepinfer_prep.quantized import Element

FORMAT_VERSION = 2
"""2: the sidecar lies in a folder of its own. 1 (deepinfer-prep 0.1.0): it lay beside the shards."""


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """One quantized weight.

    `element` is "e4m3" (halved) or "e2m1" (two values a byte, as stored). `block` is how many rows and
    logical columns one scale value covers, None where nothing states it. `kernel_scale` names the tensor of
    e8m0 bytes that the kernels take; where it is None, `reason` says why there is none.
    """

    element: Element
    block: tuple[int, int] | None
    scale: str
    kernel_scale: str | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """The bf16 halves of an fp32 matrix: the names of two tensors in the sidecar."""

    hi: str
    lo: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the output; `digests` are xxh3-128 of its 64 MiB segments, in hex."""

    size: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """What halving met in the source's e4m3fn weights."""

    rounded: int
    """Codes whose half is not representable: half a step of the smallest magnitudes."""
    nan: int
    """NaN codes, kept."""
    above_240: int
    """Finite codes above 240, which the hardware would have read as infinity or NaN; "misread" in JSON."""

    def to_json(self) -> dict[str, int]:
        """The counts under the keys of the manifest."""
        return {"rounded": self.rounded, "nan": self.nan, "misread": self.above_240}

    @classmethod
    def from_json(cls, data: Mapping[str, int]) -> Counts:
        """The counts that `to_json` wrote."""
        return cls(data["rounded"], data["nan"], data["misread"])


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole manifest; field names are the JSON keys, but for those that `Counts.to_json` names."""

    format_version: int
    tool_version: str
    family: str
    source_fingerprint: str
    options: Mapping[str, Any]
    counts: Counts
    nan_tensors: Mapping[str, int]
    shards: tuple[str, ...]
    """File names of the main shards, which lie at the top of the folder."""
    sidecar: tuple[str, ...]
    """Names of the sidecar's files, relative to the folder."""
    activation_scales: tuple[str, ...]
    """Static scales of activations and of the KV cache; `options` says whether they were doubled."""
    unscaled: tuple[str, ...]
    """e4m3 tensors without a scale, copied: no code in them lies above 240."""
    split: Mapping[str, SplitRecord]
    weights: Mapping[str, WeightRecord]
    files: Mapping[str, FileRecord]

    def to_json(self) -> bytes:
        """The manifest's text; the same manifest always gives the same bytes."""
        data = {**asdict(self), "counts": self.counts.to_json()}
        return json.dumps(data, indent=1, ensure_ascii=False).encode() + b"\n"


def read_manifest(folder: Place) -> Manifest:
    """Read the manifest of a finished output.

    Raises:
        ManifestError: the folder is not a finished output, or one of another format version.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ManifestError(
            f"{folder} has no {MANIFEST_NAME}: it is not a finished output of deepinfer-prep. "
            "If a conversion was interrupted, run it again to resume it.",
            code="no-output",
        ) from None
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Place) -> Manifest:
    """Parse a manifest's text.

    Raises:
        ManifestError: it is damaged or of another format version.
    """
    try:
        data = json.loads(text)
        version = data["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path} is damaged ({error!r}). Convert the checkpoint again.") from None
    if version == 1:
        raise ManifestError(
            f"{path} has format version 1: the output was written by deepinfer-prep 0.1.0, which put tensors of its "
            "own beside the shards, where several loaders stop at them. Convert the original checkpoint again."
        )
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{path} has format version {version!r}, but this version of deepinfer-prep reads {FORMAT_VERSION}. "
            "Use the version that wrote it, or convert the checkpoint again."
        )
    try:
        return _from_json(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ManifestError(f"{path} is damaged ({error!r}). Convert the checkpoint again.") from None


def _from_json(data: dict[str, Any]) -> Manifest:
    return Manifest(
        **{
            **data,
            "counts": Counts.from_json(data["counts"]),
            "shards": tuple(data["shards"]),
            "sidecar": tuple(data["sidecar"]),
            "activation_scales": tuple(data["activation_scales"]),
            "unscaled": tuple(data["unscaled"]),
            "split": {name: SplitRecord(**record) for name, record in data["split"].items()},
            "weights": {name: _weight(record) for name, record in data["weights"].items()},
            "files": {
                name: FileRecord(record["size"], tuple(record["digests"])) for name, record in data["files"].items()
            },
        }
    )


def _weight(record: dict[str, Any]) -> WeightRecord:
    block = record["block"]
    return WeightRecord(**{**record, "block": None if block is None else (block[0], block[1])})

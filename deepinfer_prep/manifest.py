"""What a finished output says about itself: `neuron_manifest.json`, written last.

It is all that `verify` and the runtime need to know about names and formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from deepinfer_prep import kernel_layout
from deepinfer_prep.errors import ManifestError
from deepinfer_prep.files import segments
from deepinfer_prep.files.storage import Place
from deepinfer_prep.files.untrusted import (
    MANIFEST,
    JsonError,
    leads_out,
    name_problem,
    parse_object,
    read_small_file,
    shorten,
)
from deepinfer_prep.naming import LAID_OUT_SUFFIX, MANIFEST_NAME, SHARD_SUFFIX, SIDECAR_FOLDER
from deepinfer_prep.quantized import Element

FORMAT_VERSION = 2
"""2: the sidecar lies in a folder of its own. 1 (deepinfer-prep 0.1.0): it lay beside the shards."""
LAID_OUT_FORMAT_VERSION = 3
"""Version 2 with tensors in the kernels' order, which readers of version 2 alone would take for something else."""


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """That a tensor's bytes stand in another order than the source's: it is then U8, under another name."""

    name: str
    """Of the layout, `kernel_layout.LAYOUT_NAME`."""
    version: int
    dtype: str
    """Of the source's tensor, as safetensors calls it."""
    shape: tuple[int, ...]
    """Of either tensor."""


@dataclass(frozen=True, slots=True)
class LaidOutTensor:
    """What a tensor of the output holds whose bytes stand in the kernels' order."""

    name: str
    """Of the source's tensor."""
    layout: LayoutRecord
    content: kernel_layout.Content


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """One quantized weight.

    `element` is "e4m3" (halved) or "e2m1" (two values a byte, as stored). `block` is how many rows and
    logical columns one scale value covers, None where nothing states it. `kernel_scale` names the tensor of
    e8m0 bytes that the kernels take; where it is None, `reason` says why there is none. `layout` and
    `scale_layout` are there where the bytes of weight and scale stand in the kernels' order, and absent elsewhere.
    """

    element: Element
    block: tuple[int, int] | None
    scale: str
    kernel_scale: str | None
    reason: str = ""
    layout: LayoutRecord | None = None
    scale_layout: LayoutRecord | None = None

    def tensor(self, weight: str) -> str:
        """The name of the tensor that holds the weight of this name."""
        return weight if self.layout is None else weight + LAID_OUT_SUFFIX

    @property
    def scale_tensor(self) -> str:
        """The name of the tensor that holds the scale."""
        return self.scale if self.scale_layout is None else self.scale + LAID_OUT_SUFFIX


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
    source_url: str = ""
    """Address and commit of a source on the Hugging Face hub; the key is absent for any other source."""

    @property
    def laid_out(self) -> dict[str, LaidOutTensor]:
        """What stands in the kernels' order, by the names of the tensors that hold it."""
        found = {}
        for weight, record in self.weights.items():
            if record.layout is not None:
                found[record.tensor(weight)] = LaidOutTensor(weight, record.layout, record.element)
            if record.scale_layout is not None:
                found[record.scale_tensor] = LaidOutTensor(record.scale, record.scale_layout, "e8m0")
        return found

    def to_json(self) -> bytes:
        """The manifest's text; the same manifest always gives the same bytes."""
        data = {**asdict(self), "counts": self.counts.to_json()}
        if not self.source_url:
            del data["source_url"]
        for weight in data["weights"].values():
            for layout in _LAYOUT_FIELDS:
                if weight[layout] is None:
                    del weight[layout]
        return json.dumps(data, indent=1, ensure_ascii=False).encode() + b"\n"


def read_manifest(folder: Place) -> Manifest:
    """Read the manifest of a finished output.

    Raises:
        ManifestError: the folder is not a finished output, or one of another format version.
    """
    path = folder / MANIFEST_NAME
    if isinstance(folder, Path) and isinstance(path, Path) and leads_out(folder, path):
        raise _damaged(path, "is a link that leads out of its folder")
    try:
        text = read_small_file(path, MANIFEST.nbytes)
    except FileNotFoundError:
        raise ManifestError(
            f"{folder} has no {MANIFEST_NAME}: it is not a finished output of deepinfer-prep. "
            "If a conversion was interrupted, run it again to resume it.",
            code="no-output",
        ) from None
    except JsonError as error:
        raise _damaged(path, str(error)) from None
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Place) -> Manifest:
    """Parse a manifest's text.

    Raises:
        ManifestError: it is damaged or of another format version.
    """
    try:
        data = parse_object(text, MANIFEST)
    except JsonError as error:
        raise _damaged(path, str(error)) from None
    version = data.get("format_version")
    if version == 1:
        raise ManifestError(
            f"{path} has format version 1: the output was written by deepinfer-prep 0.1.0, which put tensors of its "
            "own beside the shards, where several loaders stop at them. Convert the original checkpoint again."
        )
    if type(version) is int and version not in _FORMAT_VERSIONS:
        raise ManifestError(
            f"{path} has format version {version!r}, but this version of deepinfer-prep reads "
            f"{' and '.join(map(str, _FORMAT_VERSIONS))}. "
            "Use the version that wrote it, or convert the checkpoint again."
        )
    try:
        return _manifest(data)
    except _OtherLayoutError as error:
        raise ManifestError(
            f"{path}: bytes of weights stand in the layout {error}, but this version of deepinfer-prep reads "
            f"{kernel_layout.LAYOUT_NAME!r} version {kernel_layout.LAYOUT_VERSION}. Use the version that wrote it, or "
            "convert the checkpoint again."
        ) from None
    except _FieldError as error:
        raise _damaged(path, f"is not of the manifest's form: {error}") from None


def _damaged(path: Place, problem: str) -> ManifestError:
    return ManifestError(f"{path} is damaged: it {problem}. Convert the checkpoint again.")


class _FieldError(ValueError):
    """A field of a manifest is not of its type; the message says which and how."""


class _OtherLayoutError(ValueError):
    """Weights stand in an order that this version does not know; the message is its name and version."""


_Value = TypeVar("_Value")


def _expect(condition: bool, where: str, wanted: str, found: Any) -> None:
    if not condition:
        raise _FieldError(f"expected {wanted} at {where}, found {shorten(found)}")


def _text(value: Any, where: str) -> str:
    _expect(isinstance(value, str), where, "text", value)
    return str(value)


def _count(value: Any, where: str) -> int:
    _expect(type(value) is int and 0 <= value < 2**63, where, "a whole number", value)
    return int(value)


def _texts(value: Any, where: str) -> tuple[str, ...]:
    _expect(isinstance(value, list) and all(isinstance(item, str) for item in value), where, "a list of texts", value)
    return tuple(value)


def _map(value: Any, where: str, read: Callable[[Any, str], _Value]) -> dict[str, _Value]:
    _expect(isinstance(value, dict), where, "an object", value)
    result, key = {}, ""
    try:
        for key, item in value.items():
            result[key] = read(item, where)
    except _FieldError as error:
        raise _FieldError(f"{error} ({shorten(key)})") from None
    return result


def _fields(value: Any, where: str, names: Collection[str]) -> dict[str, Any]:
    _expect(isinstance(value, dict) and value.keys() == {*names}, where, f"the fields {', '.join(names)}", value)
    fields: dict[str, Any] = value
    return fields


def _manifest(data: dict[str, Any]) -> Manifest:
    _expect(
        data.keys() | {"source_url"} == {*_MANIFEST_FIELDS},
        "the top",
        f"the fields {', '.join(_MANIFEST_FIELDS)}",
        list(data),
    )
    version = _version(data["format_version"])
    weight = _weight if version == LAID_OUT_FORMAT_VERSION else _plain_weight
    shards = _file_names(data["shards"], "shards", "")
    sidecar = _file_names(data["sidecar"], "sidecar", SIDECAR_FOLDER + "/")
    files = _map(data["files"], "files", _file)
    for name in files:
        problem = name_problem(name)
        _expect(not problem and name != MANIFEST_NAME, "files", "names of files in the folder", name)
    for name in (*shards, *sidecar):
        _expect(name in files, "files", f"a record of {shorten(name)}", "none")
    return Manifest(
        format_version=version,
        tool_version=_text(data["tool_version"], "tool_version"),
        family=_text(data["family"], "family"),
        source_fingerprint=_text(data["source_fingerprint"], "source_fingerprint"),
        options=_map(data["options"], "options", lambda value, where: value),
        counts=_counts(data["counts"]),
        nan_tensors=_map(data["nan_tensors"], "nan_tensors", _count),
        shards=shards,
        sidecar=sidecar,
        activation_scales=_texts(data["activation_scales"], "activation_scales"),
        unscaled=_texts(data["unscaled"], "unscaled"),
        split=_map(data["split"], "split", _split),
        weights=_map(data["weights"], "weights", weight),
        files=files,
        source_url=_text(data.get("source_url", ""), "source_url"),
    )


def _version(value: Any) -> int:
    _expect(type(value) is int and value in _FORMAT_VERSIONS, "format_version", str(FORMAT_VERSION), value)
    return int(value)


def _file_names(value: Any, where: str, folder: str) -> tuple[str, ...]:
    """Names of safetensors files right below one folder of the output."""
    names = _texts(value, where)
    for name in names:
        is_plain = name.startswith(folder) and "/" not in name[len(folder) :] and not name_problem(name)
        _expect(is_plain and name.endswith(SHARD_SUFFIX), where, f"names like {folder}*{SHARD_SUFFIX}", name)
    _expect(len(set(names)) == len(names), where, "each name once", value)
    return names


def _counts(value: Any) -> Counts:
    found = _fields(value, "counts", ("rounded", "nan", "misread"))
    return Counts(*(_count(found[name], f"counts, {name}") for name in ("rounded", "nan", "misread")))


def _split(value: Any, where: str) -> SplitRecord:
    found = _fields(value, where, ("hi", "lo"))
    return SplitRecord(_text(found["hi"], where), _text(found["lo"], where))


def _file(value: Any, where: str) -> FileRecord:
    found = _fields(value, where, ("size", "digests"))
    size, digests = _count(found["size"], "files, size"), _texts(found["digests"], "files, digests")
    count = len(range(0, max(size, 1), segments.SEGMENT_BYTES))
    _expect(len(digests) == count, "files, digests", f"{count:,} digests for {size:,} bytes", digests)
    _expect(all(map(_DIGEST.fullmatch, digests)), "files, digests", "digests of 32 hexadecimal digits", digests)
    return FileRecord(size, digests)


def _weight(value: Any, where: str) -> WeightRecord:
    if not isinstance(value, dict):
        return _plain_weight(value, where)
    plain = _plain_weight({name: item for name, item in value.items() if name not in _LAYOUT_FIELDS}, where)
    found = {name: _layout(value[name], name) for name in _LAYOUT_FIELDS if name in value}
    weight, scale = found.get("layout"), found.get("scale_layout")
    fits = scale is None or (weight is not None and weight.shape[:-1] == scale.shape[:-1])
    _expect(fits, "weights, scale_layout", "a scale of the rows of a weight in this layout", value.get("scale_layout"))
    return replace(plain, layout=weight, scale_layout=scale)


def _layout(value: Any, field: str) -> LayoutRecord:
    where = f"weights, {field}"
    found = _fields(value, where, ("name", "version", "dtype", "shape"))
    name, version = _text(found["name"], where), _count(found["version"], where)
    if (name, version) != (kernel_layout.LAYOUT_NAME, kernel_layout.LAYOUT_VERSION):
        raise _OtherLayoutError(f"{shorten(name)} version {version}")
    dtype, shape = _text(found["dtype"], where), found["shape"]
    dtypes = _LAYOUT_FIELDS[field]
    _expect(dtype in dtypes, where, " or ".join(dtypes), dtype)
    is_shape = isinstance(shape, list) and len(shape) in (2, 3)
    _expect(is_shape and all(_count(size, where) > 0 for size in shape), where, "two or three sizes", shape)
    return LayoutRecord(name, version, dtype, tuple(shape))


def _plain_weight(value: Any, where: str) -> WeightRecord:
    found = _fields(value, where, _WEIGHT_FIELDS)
    element, block, kernel_scale = found["element"], found["block"], found["kernel_scale"]
    _expect(element in ("e4m3", "e2m1"), "weights, element", "e4m3 or e2m1", element)
    _expect(
        block is None
        or (
            isinstance(block, list)
            and len(block) == 2
            and all(type(side) is int and 0 < side < 2**63 for side in block)
        ),
        "weights, block",
        "two positive whole numbers or null",
        block,
    )
    _expect(
        kernel_scale is None or isinstance(kernel_scale, str), "weights, kernel_scale", "text or null", kernel_scale
    )
    return WeightRecord(
        element=element,
        block=None if block is None else (block[0], block[1]),
        scale=_text(found["scale"], "weights, scale"),
        kernel_scale=kernel_scale,
        reason=_text(found["reason"], "weights, reason"),
    )


_MANIFEST_FIELDS = tuple(field.name for field in fields(Manifest))
_LAYOUT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "layout": ("F8_E4M3", "I8", "U8"),
    "scale_layout": ("F8_E8M0", "U8"),
}
"""Fields that are there for tensors in the kernels' order, each with the dtypes that these have in the source."""
_WEIGHT_FIELDS = tuple(field.name for field in fields(WeightRecord) if field.name not in _LAYOUT_FIELDS)
_FORMAT_VERSIONS = (FORMAT_VERSION, LAID_OUT_FORMAT_VERSION)
_DIGEST = re.compile("[0-9a-f]{32}")

"""A checkpoint on disk: the index and the headers, put together into tensors and where each lies.

Only headers and small JSON files are read. A checkpoint that contradicts itself is refused here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_prep.errors import CheckpointError, list_some
from deepinfer_prep.files.completeness import check_complete, explain_no_shards, explain_no_source
from deepinfer_prep.files.container import Header, Location, TensorInfo, read_header
from deepinfer_prep.files.source_files import OtherFile, check_is_text, check_link, exists, find_others
from deepinfer_prep.files.storage import FileState, Place, open_reader
from deepinfer_prep.files.untrusted import CONFIG, INDEX, JsonError, Limits, name_problem, read_object, shorten
from deepinfer_prep.naming import INDEX_SUFFIX, PREFERRED_INDEX, SHARD_SUFFIX, WORKSPACE_NAME
from deepinfer_prep.quantized import FLOAT_DTYPES

# Names of the files that one rank of a distributed run wrote: model0-mp8, tp1_sharded_checkpoint, model-rank-0-part-1.
_RANK = re.compile(r"(?<![a-z])(?:rank[-_.]?|tp|pp|ep|mp|model(?=[0-9]+-mp)|part[-_.]?)[0-9]+")
_CONFIG_NAMES = ("config.json", "hf_quant_config.json", "params.json")
_READ_AT_ONCE = 16
_MOST_NAMES = 10
_MOST_TEXT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of the checkpoint."""

    name: str
    path: Place
    state: FileState
    header: Header


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that headers and JSON files say about a checkpoint."""

    root: Place
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    """Every tensor by name; the offsets are those in its own shard."""
    shard_of: Mapping[str, int]
    """Tensor name -> position in `shards`."""
    configs: Mapping[str, Mapping[str, Any]]
    """config.json and the other JSON files beside the shards that may describe the quantization, by name."""
    others: tuple[OtherFile, ...]
    warnings: tuple[str, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, or an empty map."""
        return self.configs.get("config.json", {})

    def where(self, tensor: str) -> str:
        """A tensor with its file, for messages."""
        return f"{self.shards[self.shard_of[tensor]].path}: tensor {tensor!r}"

    def location(self, tensor: str) -> Location:
        """Where a tensor's bytes lie."""
        shard = self.shards[self.shard_of[tensor]]
        return Location(shard.path, shard.header.data_start, self.tensors[tensor])


def open_checkpoint(path: Place, follow_links: bool = False) -> Checkpoint:
    """Read the headers of a checkpoint: a folder, or one .safetensors file with the config.json beside it.

    Links in the folder that lead out of it are refused, but for those of a Hugging Face cache, unless `follow_links`.

    Raises:
        ContainerError: a file is not a well-formed safetensors file.
        CheckpointError: files are missing, or the index and the shards disagree.
        OSError: something cannot be read.
    """
    if not path.exists():
        raise explain_no_source(path)
    if not path.is_dir():
        check_is_text(path.name, path.parent)
        return _assemble(
            path.parent, [read_shard(path)], _read_configs(path.parent, _CONFIG_NAMES, follow_links), (), []
        )
    if (path / WORKSPACE_NAME / "journal").exists():
        raise CheckpointError(
            f"{path} holds an unfinished run of deepinfer-prep ({WORKSPACE_NAME}): it is an output, not a checkpoint. "
            f"Give the original checkpoint; if this is it, remove {path / WORKSPACE_NAME}.",
            code="unfinished-run",
        )
    index_name = _find_index(path)
    if index_name:
        check_link(path, path / index_name, follow_links)
    weight_map = read_index(path / index_name) if index_name else None
    names = _shard_names(path, weight_map)
    for name in names:
        check_link(path, path / name, follow_links)
    check_complete(path, names)
    shards = _read_shards([path / name for name in names])
    if weight_map is None:
        shards = _without_spare_scales(shards)
    warnings = []
    if weight_map is not None and index_name is not None:
        check_index(path / index_name, weight_map, shards)
        warnings += _check_total_size(path / index_name, shards)
    others, other_warnings = find_others(path, {shard.name for shard in shards}, follow_links)
    others, index_warnings = _without_dangling_indexes(index_name, others)
    configs = _read_configs(path, _config_names(path), follow_links)
    return _assemble(path, shards, configs, others, [*warnings, *other_warnings, *index_warnings])


def _without_spare_scales(shards: list[Shard]) -> list[Shard]:
    """The shards without those that only repeat scales of others (`act_scales.safetensors`): these are copied."""
    counts = Counter(tensor.name for shard in shards for tensor in shard.header.tensors)

    def is_spare(shard: Shard) -> bool:
        return any(counts[tensor.name] > 1 for tensor in shard.header.tensors) and all(
            tensor.dtype in FLOAT_DTYPES and "scale" in tensor.name.rpartition(".")[2]
            for tensor in shard.header.tensors
        )

    return [shard for shard in shards if not is_spare(shard)]


def _without_dangling_indexes(
    used: str | None, others: tuple[OtherFile, ...]
) -> tuple[tuple[OtherFile, ...], list[str]]:
    """The other files without indexes of shards that do not go along: a loader would look for these in vain."""
    copied = {other.name for other in others}
    dangling = {
        other.name: missing
        for other in others
        if other.name.endswith(INDEX_SUFFIX) and other.name != used
        if (missing := _named_but_absent(other, copied))
    }
    kept = tuple(other for other in others if other.name not in dangling)
    return kept, [
        f"{name} is not copied: {missing}, which it names, is not copied either." for name, missing in dangling.items()
    ]


def _named_but_absent(index: OtherFile, copied: set[str]) -> str:
    """The first file that an index names and that is not among those copied; empty where there is none."""
    folder = index.name.rpartition("/")[0]
    try:
        names = sorted(set(read_index(index.path).values()))
    except CheckpointError:
        return ""
    return next((name for name in names if (f"{folder}/{name}" if folder else name) not in copied), "")


def _assemble(
    root: Place,
    shards: list[Shard],
    configs: Mapping[str, Mapping[str, Any]],
    others: tuple[OtherFile, ...],
    warnings: list[str],
) -> Checkpoint:
    tensors: dict[str, TensorInfo] = {}
    shard_of: dict[str, int] = {}
    for position, shard in enumerate(shards):
        for tensor in shard.header.tensors:
            if tensor.name in tensors:
                raise _explain_two_files(tensor.name, shards[shard_of[tensor.name]], shard)
            tensors[tensor.name] = tensor
            shard_of[tensor.name] = position
    return Checkpoint(root, tuple(shards), tensors, shard_of, configs, others, tuple(warnings))


def _explain_two_files(tensor: str, first: Shard, second: Shard) -> CheckpointError:
    found = f"tensor {tensor!r} is in two files, {first.path} and {second.path}"
    if _RANK.search(first.name) and _RANK.sub("", first.name) == _RANK.sub("", second.name):
        return CheckpointError(
            f"{found}, whose names are those of single ranks of a distributed checkpoint. Each rank's file is "
            f"converted by itself, with an output of its own: `deepinfer-prep convert {first.path} OUT`.",
            code="tensor-in-two-files",
        )
    return CheckpointError(
        f"{found}: which one is meant cannot be known. Move the files that do not belong to the checkpoint away, "
        "or add an index that names each tensor's file.",
        code="tensor-in-two-files",
    )


def read_shard(path: Place) -> Shard:
    """Read the header of one shard; errors as `read_header`."""
    state = FileState.of(path)
    return Shard(path.name, path, state, read_header(path))


def _read_shards(paths: list[Place]) -> list[Shard]:
    if all(isinstance(path, Path) for path in paths):
        return [read_shard(path) for path in paths]
    with ThreadPoolExecutor(_READ_AT_ONCE) as executor:  # Each waits for answers of a store.
        return list(executor.map(read_shard, paths))


def _find_index(folder: Place) -> str | None:
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(INDEX_SUFFIX) and entry.is_file())
    if PREFERRED_INDEX in names:
        return PREFERRED_INDEX
    if len(names) > 1:
        raise CheckpointError(
            f"{folder} holds several indexes and none is {PREFERRED_INDEX}: {', '.join(names)}. "
            "Keep the one that belongs to the checkpoint.",
            code="several-indexes",
        )
    return names[0] if names else None


def read_index(path: Place) -> Mapping[str, str]:
    """The weight map of an index: tensor name -> file name, plain names only.

    Raises:
        CheckpointError: there is no weight map, or it names something outside the folder.
    """
    index = read_json(path, INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{path} has no `weight_map` from tensor names to file names. Fetch it again.", code="bad-index"
        )
    for name in sorted(set(weight_map.values())):
        if "/" in name or name_problem(name) or not name.endswith(SHARD_SUFFIX):
            raise CheckpointError(
                f"{path} names the file {shorten(name)}, but an index may name only plain files in its own folder "
                f"that end in {SHARD_SUFFIX}.",
                code="name-outside",
            )
    return weight_map


def _shard_names(folder: Place, weight_map: Mapping[str, str] | None) -> list[str]:
    if weight_map is None:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(SHARD_SUFFIX))
        if not names:
            raise explain_no_shards(folder)
        return names
    counts = Counter(weight_map.values())
    missing = [name for name in sorted(counts) if not exists(folder / name)]
    if missing:
        listed = list_some(missing, _MOST_NAMES, lambda name: f"{name} ({_tensors(counts[name])})")
        raise CheckpointError(
            f"{folder}: files that the index names are missing: {listed}; "
            f"{len(counts) - len(missing)} of {len(counts)} shards present. "
            "The download is not complete: fetch the missing files.",
            code="missing-shard",
        )
    return sorted(counts)


def _tensors(count: int) -> str:
    return f"{count:,} tensor" + ("" if count == 1 else "s")


def check_index(path: Place, weight_map: Mapping[str, str], shards: Iterable[Shard]) -> None:
    """Compare an index with the headers of its shards.

    Raises:
        CheckpointError: one names a tensor that the other does not have.
    """
    found = {tensor.name: shard.name for shard in shards for tensor in shard.header.tensors}
    absent = [name for name, shard in weight_map.items() if found.get(name) != shard]
    if absent:
        raise CheckpointError(
            f"{path} names {_tensors(len(absent))} that the named shards do not hold: {_first(absent, weight_map)}. "
            "The index belongs to other shards, or a shard was replaced: fetch both again.",
            code="index-mismatch",
        )
    unnamed = [name for name in found if name not in weight_map]
    if unnamed:
        raise CheckpointError(
            f"{path} does not name {_tensors(len(unnamed))} that the shards hold: {_first(unnamed, found)}. "
            "Loaders would miss them: fetch the index again, or add the names to it.",
            code="index-mismatch",
        )


def _first(names: list[str], shard_of: Mapping[str, str]) -> str:
    return list_some(names, _MOST_NAMES, lambda name: f"{name!r} ({shard_of[name]})")


def _check_total_size(path: Place, shards: list[Shard]) -> list[str]:
    metadata = read_json(path, INDEX).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(shard.header.data_size for shard in shards)
    if stated in (None, 0, "0", actual, str(actual)):
        return []
    return [
        f"{path} states a total_size of {shorten(stated)} but the tensors take {actual:,} bytes; "
        "loaders do not depend on it, and the index is copied as it is."
    ]


def read_small_tensor(checkpoint: Checkpoint, name: str) -> bytes:
    """The bytes of a tensor that holds text rather than numbers; empty for one of more than 64 KiB.

    Raises:
        PrepError, OSError: its file cannot be read.
    """
    location = checkpoint.location(name)
    content = bytearray(location.tensor.nbytes if location.tensor.nbytes <= _MOST_TEXT_BYTES else 0)
    with closing(open_reader(location.path)) as file:
        file.read_into(memoryview(content), location.data_start + location.tensor.start)
    return bytes(content)


def _config_names(folder: Place) -> list[str]:
    """The usual names of configs, then every other JSON file of the folder that has "quant" in its name."""
    names = (path.name for path in folder.iterdir())
    other = sorted(name for name in names if "quant" in name.lower() and name.endswith(".json"))
    return list(dict.fromkeys([*_CONFIG_NAMES, *other]))


def _read_configs(folder: Place, names: Iterable[str], follow_links: bool) -> Mapping[str, Mapping[str, Any]]:
    configs = {}
    for name in names:
        # What is called so and is no file is told where the other files are looked at; config.json has to be one.
        if (folder / name).is_file() or (name == "config.json" and (folder / name).exists()):
            check_link(folder, folder / name, follow_links)
            configs[name] = read_json(folder / name, CONFIG)
    return configs


def read_json(path: Place, limits: Limits) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        CheckpointError: it is no regular file, too large, or not a JSON object.
    """
    try:
        return read_object(path, limits)
    except JsonError as error:
        raise CheckpointError(f"{path} {error}. Fetch it again.", code="bad-json") from None

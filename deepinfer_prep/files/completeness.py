"""Whether a folder holds all of a checkpoint, as far as the names of its files tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from deepinfer_prep.errors import CheckpointError, list_some
from deepinfer_prep.files.storage import Place
from deepinfer_prep.naming import SHARD_SUFFIX

_NUMBERED = re.compile(r"(?P<head>[^\n]*?)(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,6})(?P<tail>[^\n]*)")
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload")
_MOST_NAMES = 10
_DEEPEST = 4
_NO_DOWNLOADS = (".git", "__pycache__")
_MOST_FOLDERS = 20


def check_complete(folder: Place, names: Iterable[str]) -> None:
    """Compare file names that say how many files there are ("model-00001-of-00003") with the files that are there.

    Raises:
        CheckpointError: files are missing, in whichever numbering; unfinished downloads are named as well.
    """
    names = list(names)
    missing = list(_missing(names))
    if not missing:
        return
    remains = list(_unfinished(folder))
    raise CheckpointError(
        f"{folder}: the names of its {len(names):,} shards say that there are more: {len(missing):,} are missing, "
        f"{list_some(missing, _MOST_NAMES)}. "
        + (f"Unfinished downloads lie in {list_some(remains, _MOST_NAMES)}. " if remains else "")
        + "Fetch the missing files; if the others are a whole checkpoint, move them to a folder of their own.",
        code="missing-shard",
    )


def _missing(names: Iterable[str]) -> Iterator[str]:
    """The names that each numbering lacks. One that counts from 0 to count - 1 is as good as one from 1 to count."""
    numberings: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name.removesuffix(SHARD_SUFFIX))
        if match is not None:
            key = match["head"], match["count"], match["tail"]
            numberings.setdefault(key, {})[int(match["number"])] = match["number"]
    for (head, count, tail), found in numberings.items():
        first = 0 if 0 in found else 1
        width = len(next(iter(found.values()))) if any(text.startswith("0") for text in found.values()) else 0
        for number in range(first, first + int(count)):
            if number not in found:
                yield f"{head}{number:0{width}d}-of-{count}{tail}{SHARD_SUFFIX}"


def _unfinished(folder: Place) -> Iterator[str]:
    for path, relative in _below(folder, lambda place: place.name not in _NO_DOWNLOADS):
        if path.name.endswith(_UNFINISHED):
            yield relative


def folders_with_shards(folder: Place) -> list[str]:
    """Relative paths of the folders below this one that hold safetensors files: a pipeline's parts, cache snapshots."""
    shards = (
        relative
        for path, relative in _below(folder, lambda place: not place.name.startswith("."))
        if path.name.endswith(SHARD_SUFFIX) and "/" in relative
    )
    parts = dict.fromkeys(relative.rpartition("/")[0] for relative in shards)
    return list(islice(parts, _MOST_FOLDERS))


def _below(folder: Place, enters: Callable[[Place], bool]) -> Iterator[tuple[Place, str]]:
    """Files below a folder with their relative paths, some folders deep; links to folders are not followed."""
    unread: list[tuple[Place, str, int]] = [(folder, "", 0)]
    while unread:
        place, prefix, depth = unread.pop(0)
        entries: list[Place] = sorted(place.iterdir(), key=lambda entry: entry.name)
        for path in entries:
            if not path.is_dir():
                yield path, prefix + path.name
            elif depth < _DEEPEST and not path.is_symlink() and enters(path):
                unread.append((path, f"{prefix}{path.name}/", depth + 1))


def explain_no_shards(folder: Place) -> CheckpointError:
    """The error for a folder without safetensors files, naming the folders below it that can be converted."""
    found = folders_with_shards(folder)
    if not found:
        return CheckpointError(
            f"{folder} holds no .safetensors file. Give the folder that holds the checkpoint's shards.",
            code="no-shards",
        )
    return CheckpointError(
        f"{folder} holds no .safetensors file itself, but folders below it do: {', '.join(found)}. Convert each that "
        f"holds fp8 by itself, with an output of its own: `deepinfer-prep convert {folder / found[0]} OUT`.",
        code="no-shards",
    )


def explain_no_source(path: Place) -> CheckpointError:
    """The error for a path that leads nowhere; an address or a name on the hub is told apart."""
    text = str(path)
    if not isinstance(path, Path):
        what = f"{text} does not exist. "
    elif re.match(r"[a-z][a-z0-9+]*:/", text):
        what = f"{text} is an address, and only files of this machine can be read: fetch the checkpoint first. "
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        what = (
            f"{text} does not exist. If it is a name on the Hugging Face hub, give hf://{text}, or fetch it first: "
            f"`hf download {text} --local-dir {path.name}`. "
        )
    else:
        what = f"{text} does not exist. "
    return CheckpointError(f"{what}Give the folder of a checkpoint, or one .safetensors file.", code="no-checkpoint")

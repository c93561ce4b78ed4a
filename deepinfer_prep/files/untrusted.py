"""Files and names that nobody vouches for: what they have to be before anything believes them.

JSON (manifests, journals, indexes, configs and the files beside them) is read only from a regular file of a bearable
size. Its text is parsed only where it cannot take much memory, and what comes out has no key twice and is not nested
beyond reason. Callers check the types of what they use. Names may lead only to files inside their folder.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_prep.files.storage import Place

MOST_NAME_CHARACTERS = 4096
DEEPEST = 64
"""Levels of lists and objects; configs have fewer than ten."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one kind of file may hold at most: bytes, and values (numbers, texts, lists and objects)."""

    nbytes: int
    values: int


CONFIG = Limits(64 * 1024**2, 4_000_000)
"""config.json and other side files: the largest known lists a few hundred thousand modules."""
INDEX = Limits(512 * 1024**2, 8_000_000)
MANIFEST = Limits(1024**3, 48_000_000)
JOURNAL_LINE = Limits(256 * 1024**2, 8_000_000)


class JsonError(ValueError):
    """A file or text is not acceptable JSON; the message is a sentence part that follows the file's name."""


def name_problem(name: str) -> str:
    """Why a file name in a manifest cannot be one inside its folder, as a sentence part; empty where it can."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        return "leads out of its folder or is no plain relative path"
    if len(name) > MOST_NAME_CHARACTERS or any(len(part.encode("utf-8", "replace")) > 255 for part in parts):
        return "is longer than a file's name can be"
    return ""


def leads_out(root: Path, path: Path) -> bool:
    """Whether links on the way from a folder to a file in it lead out of the folder.

    In a snapshot of a Hugging Face cache (`<repository>/snapshots/<revision>`) links into `<repository>/blobs` do not
    count: all of its files are such links.
    """
    base, target = os.path.realpath(root), os.path.realpath(path)
    if target.startswith(base + os.sep):
        return False
    snapshots, _ = os.path.split(base)
    repository, name = os.path.split(snapshots)
    return not (name == "snapshots" and target.startswith(os.path.join(repository, "blobs") + os.sep))


def read_small_file(place: Place, most_bytes: int) -> bytes:
    """All bytes of a file that is not larger than `most_bytes`.

    Raises:
        JsonError: it is no regular file, or too large.
        FileNotFoundError: it is not there.
        OSError: it cannot be read.
    """
    if not isinstance(place, Path):
        _check_size(place.state().size, most_bytes)
        return place.read_bytes()
    try:
        # A pipe that nobody writes to would make a plain open wait for ever.
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # It is a socket.
            raise JsonError("is no regular file") from None
        raise
    try:
        return read_descriptor(descriptor, most_bytes)
    finally:
        with suppress(OSError):  # Nothing was written through it.
            os.close(descriptor)


def read_descriptor(descriptor: int, most_bytes: int) -> bytes:
    """As `read_small_file`, for a file that is open."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise JsonError("is no regular file")
    _check_size(status.st_size, most_bytes)
    parts, left = [], most_bytes + 1
    while left and (part := os.read(descriptor, min(left, 16 * 1024**2))):
        parts.append(part)
        left -= len(part)
    _check_size(most_bytes + 1 - left, most_bytes)
    return b"".join(parts)


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise JsonError(f"is larger than {most_bytes:,} bytes, which no such file needs")


def parse_object(text: bytes, limits: Limits) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        JsonError: it is not valid JSON, no object, has a key twice, or is larger or deeper than reason allows.
    """
    _check_size(len(text), limits.nbytes)
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > limits.values:
        raise JsonError(f"holds more than {limits.values:,} values, which no such file needs")
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise JsonError(f"is not valid JSON ({_first_line(error)})") from None
    if not isinstance(value, dict):
        raise JsonError("is not a JSON object")
    _check_depth(value)
    if b"\\ud" in text or b"\\uD" in text:
        _check_text(value)
    return value


def read_object(place: Place, limits: Limits) -> dict[str, Any]:
    """Read and parse a file that holds a JSON object; errors as `read_small_file` and `parse_object`."""
    return parse_object(read_small_file(place, limits.nbytes), limits)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object; raises ValueError where a key occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shorten(key)} occurs twice, and which one is meant cannot be known")
            seen.add(key)
    return result


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise JsonError(f"is nested more than {DEEPEST} levels deep")


def _check_text(value: Any) -> None:
    """Refuse half a surrogate pair, which JSON escapes can smuggle in: it is no text and cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise JsonError("holds half a surrogate pair, which is no text") from None


def shorten(value: Any, most: int = 120) -> str:
    """A value for a message: its Python form, cut where it is long, however deep or large it is."""
    if isinstance(value, str):
        value = value[:most]
    elif isinstance(value, (list, dict)) and len(value) > most:
        return f"a {type(value).__name__} of {len(value):,}"
    text = "something nested too deeply"
    with suppress(RecursionError):
        text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""What is checked about the output folder before anything is written to it: place, contents and free space."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepinfer_prep.errors import RefusedError, list_some
from deepinfer_prep.files.folders import Folder
from deepinfer_prep.naming import DISCARDED_NAME, MANIFEST_NAME, SIDECAR_FOLDER, WORKSPACE_NAME
from deepinfer_prep.writing.journal import is_same_run, read_identity
from deepinfer_prep.writing.workspace import READY_NAME, REJECTED_NAME


def check_separate(source: Path, output: Path) -> None:
    """Refuse an output that is the source, lies inside it or holds it, by any path, link or bind mount.

    Raises:
        RefusedError: they are not separate.
    """
    source, output = source.resolve(), output.resolve()
    folder = source if source.is_dir() else source.parent
    inside = source.is_dir() and (_is_inside(output, source) or _is_inside(source, output))
    if _is_same_folder(folder, output) or inside:
        raise RefusedError(
            f"the output {output} and the source {source} are the same folder or lie inside one another. "
            "Choose a separate, empty folder as the output.",
            code="same-folder",
        )


def check_sources_outside(sources: Iterable[Path], output: Path) -> None:
    """Refuse source files that are links into the output: publication would replace what they lead to.

    Raises:
        RefusedError: one of them is.
    """
    output = output.resolve()
    for source in sources:
        target = source.resolve()
        if output in target.parents:
            raise RefusedError(
                f"{source} is a link to {target}, inside the output {output}. Choose another folder as the output.",
                code="link-into-output",
            )


def _is_inside(path: Path, folder: Path) -> bool:
    return any(_is_same_folder(parent, folder) for parent in path.parents)


def _is_same_folder(one: Path, other: Path) -> bool:
    """Compares device and inode, so that a bind mount of a folder is recognised as that folder."""
    if one == other:
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def check_usable(output: Path, identity: Mapping[str, Any], names: Iterable[str], overwrite: bool) -> None:
    """Refuse an output folder that holds anything but an unfinished run of the same conversion.

    `names` are the files that the output will hold.

    Raises:
        RefusedError: it holds something else, and overwriting was not asked for; or a name of the output is
            taken by a folder or a link; or it is no folder.
    """
    if not output.is_dir():
        if output.exists() or output.is_symlink():
            raise RefusedError(f"{output} is not a folder. Choose a folder as the output.", code="not-a-folder")
        return
    _check_names_free(output, names)
    if not overwrite:
        _check_only_own_run(output, identity)


def _check_names_free(output: Path, names: Iterable[str]) -> None:
    names = list(names)
    taken = [name for name in names if (output / name).is_dir() and not (output / name).is_symlink()]
    folders = {str(folder) for name in names for folder in Path(name).parents if folder != Path()}
    for folder in sorted({WORKSPACE_NAME, SIDECAR_FOLDER, *folders}):
        path = output / folder
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            taken.append(folder)
    if taken:
        raise RefusedError(
            f"{output} cannot take the output: {list_some(taken, 5)} "
            "is a folder where a file has to go, or a file or link where a folder has to go. Move it away, or "
            "choose another output.",
            code="name-taken",
        )


def _check_only_own_run(output: Path, identity: Mapping[str, Any]) -> None:
    entries = {entry.name for entry in output.iterdir()} - {WORKSPACE_NAME, DISCARDED_NAME}
    found, is_publishing = _unfinished_run(output)
    if is_same_run(found, identity) and is_publishing:
        return  # Its publication was interrupted: files have their final names already.
    if MANIFEST_NAME in entries:
        raise RefusedError(
            f"{output} already holds a finished output. Use --overwrite to replace it.", code="finished-output"
        )
    if found is not None and not is_same_run(found, identity):
        different = [key for key in sorted({*found, *identity}) if found.get(key) != identity.get(key)]
        raise RefusedError(
            f"{output} holds an unfinished run that cannot be resumed: its {', '.join(different)} differ from this "
            "run's. Use --overwrite to start over, or finish it with the source and version that began it.",
            code="other-run",
        )
    if entries:
        raise RefusedError(
            f"{output} is not empty: it holds {list_some(sorted(entries), 5)}. Choose an empty folder, or use "
            "--overwrite to replace the safetensors files and indexes in it.",
            code="not-empty",
        )


def _unfinished_run(output: Path) -> tuple[Mapping[str, Any] | None, bool]:
    """The identity of an unfinished run, and whether its publication has begun."""
    try:
        with Folder.open(output) as folder, folder.enter(WORKSPACE_NAME) as root:
            is_publishing = any(root.status(name) is not None for name in (READY_NAME, REJECTED_NAME))
            return read_identity(root), is_publishing
    except FileNotFoundError:
        return None, False


def check_space(output: Path, needed: int) -> None:
    """Refuse when the file system has less room than the output still needs.

    Raises:
        RefusedError: with both figures.
    """
    existing = next(path for path in (output, *output.resolve().parents) if path.exists())
    if not existing.is_dir():
        raise RefusedError(f"{existing} is not a folder. Choose another output than {output}.", code="not-a-folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RefusedError(
            f"{existing} cannot be written to: it is read-only or belongs to someone else. Choose another output.",
            code="not-writable",
        )
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    written = _blocks_bytes(output / WORKSPACE_NAME)
    if needed - written > free:
        raise RefusedError(
            f"{output}: the output needs {needed:,} bytes, of which {written:,} are written already, but its file "
            f"system has {free:,} bytes free. Free some space or choose another output.",
            code="no-space",
        )


def _blocks_bytes(folder: Path) -> int:
    """Disk space that the files below a folder take; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # Another run may be publishing them.
                total += (Path(parent) / name).lstat().st_blocks * 512
    return total

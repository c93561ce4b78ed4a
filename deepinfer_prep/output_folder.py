"""The output folder: what may be written there, where an unfinished run keeps its files, and publication.

Until a run is complete everything lies in `OUT/.deepinfer-prep/`; publication renames each file to its
final name, the index after the shards and the manifest last. A kill between two renames leaves complete
files and no manifest, and the next run goes on renaming.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deepinfer_prep.checkpoint import INDEX_SUFFIX, SHARD_SUFFIX
from deepinfer_prep.errors import ConversionError, RefusedError
from deepinfer_prep.journal import read_identity
from deepinfer_prep.refusals import MANIFEST_NAME
from deepinfer_prep.storage import sync_folder

WORKSPACE_NAME = ".deepinfer-prep"


class Workspace:
    """The unfinished run inside an output folder; holding it locks the folder against other runs."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.root = output / WORKSPACE_NAME
        self.files = self.root / "files"
        self.journal = self.root / "journal"
        self.files.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RefusedError(
                (f"{output}: another conversion is writing to this folder. Wait for it, or choose another output.",)
            ) from None

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def path(self, name: str) -> Path:
        """Where a file of the output lies until it is published; its folder is made."""
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def clear(self) -> None:
        """Throw away everything that an unfinished run has written, but keep the lock."""
        shutil.rmtree(self.files)
        self.files.mkdir()
        self.journal.unlink(missing_ok=True)

    def publish(self, names: Iterable[str]) -> None:
        """Give every file its final name, in the order given, the manifest last; then remove the workspace.

        Files that an interrupted publication has moved already are taken as they are.

        Raises:
            ConversionError: a file is neither here nor at its final place.
        """
        remove_stale(self.output, frozenset(names) | {MANIFEST_NAME})
        folders = {self.output}
        for name in names:
            target = self.output / name
            target.parent.mkdir(parents=True, exist_ok=True)
            folders.add(target.parent)
            if self.path(name).exists():
                os.replace(self.path(name), target)
            elif not target.exists():
                raise ConversionError(f"{target} vanished while the output was being completed. Convert again.")
        for folder in sorted(folders):
            sync_folder(folder)
        os.replace(self.path(MANIFEST_NAME), self.output / MANIFEST_NAME)
        sync_folder(self.output)
        shutil.rmtree(self.root)


def check_separate(source: Path, output: Path) -> None:
    """Refuse an output that is the source, lies inside it or holds it, by any path or link.

    Raises:
        RefusedError: they are not separate.
    """
    source, output = source.resolve(), output.resolve()
    folder = source if source.is_dir() else source.parent
    if folder == output or (source.is_dir() and (source in output.parents or output in source.parents)):
        raise RefusedError(
            (
                f"the output {output} and the source {source} are the same folder or lie inside one another. "
                "Choose a separate, empty folder as the output.",
            )
        )


def check_usable(output: Path, identity: Mapping[str, Any], planned: Iterable[str], overwrite: bool) -> None:
    """Refuse an output folder that holds anything but an unfinished run of the same conversion.

    Raises:
        RefusedError: it holds something else, and overwriting was not asked for; or it is no folder.
    """
    if output.exists() and not output.is_dir():
        raise RefusedError((f"{output} is a file. Choose a folder as the output.",))
    if not output.exists() or overwrite:
        return
    entries = {entry.name for entry in output.iterdir()}
    if MANIFEST_NAME in entries:
        raise RefusedError((f"{output} already holds a finished output. Use --overwrite to replace it.",))
    if WORKSPACE_NAME in entries:
        _check_same_run(output, identity)
        entries -= {WORKSPACE_NAME} | {name.partition("/")[0] for name in planned}
    if entries:
        raise RefusedError(
            (
                f"{output} is not empty: it holds {', '.join(sorted(entries)[:5])}"
                f"{' and more' if len(entries) > 5 else ''}. Choose an empty folder, or use --overwrite to replace "
                "the safetensors files and indexes in it.",
            )
        )


def is_same_run(journal: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a journal was written by a run of the same source, options and tool version."""
    return read_identity(journal) == identity


def _check_same_run(output: Path, identity: Mapping[str, Any]) -> None:
    found = read_identity(output / WORKSPACE_NAME / "journal")
    if found is None or found == identity:
        return
    different = [key for key in sorted({*found, *identity}) if found.get(key) != identity.get(key)]
    raise RefusedError(
        (
            f"{output} holds an unfinished run that cannot be resumed: its {', '.join(different)} differ from this "
            "run's. Use --overwrite to start over, or finish it with the source and version that began it.",
        )
    )


def remove_stale(output: Path, names: frozenset[str]) -> None:
    """Remove an older output's manifest, and its shards and indexes that the new one does not have."""
    (output / MANIFEST_NAME).unlink(missing_ok=True)
    for entry in output.iterdir():
        if entry.name.endswith((SHARD_SUFFIX, INDEX_SUFFIX)) and entry.name not in names:
            entry.unlink()
    sync_folder(output)


def check_space(output: Path, needed: int) -> None:
    """Refuse when the file system has less room than the output still needs.

    Raises:
        RefusedError: with both figures.
    """
    existing = next(path for path in (output, *output.resolve().parents) if path.exists())
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    written = _blocks_bytes(output / WORKSPACE_NAME)
    if needed - written > free:
        raise RefusedError(
            (
                f"{output}: the output needs {needed:,} bytes, of which {written:,} are written already, but its file "
                f"system has {free:,} bytes free. Free some space or choose another output.",
            )
        )


def _blocks_bytes(folder: Path) -> int:
    """Disk space that the files below a folder take; 0 where there is none."""
    paths = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return sum(path.stat().st_blocks * 512 for path in paths)

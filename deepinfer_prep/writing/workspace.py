"""The output folder: what may be written there, and where an unfinished run keeps its files."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.files.storage import sync_folder
from deepinfer_prep.naming import DISCARDED_NAME, MANIFEST_NAME, SIDECAR_FOLDER, WORKSPACE_NAME
from deepinfer_prep.writing.journal import is_same_run, read_identity

_READY, _REJECTED = "manifest.json", "rejected.json"
_LOCK_ATTEMPTS = 100
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Workspace:
    """The unfinished run inside an output folder; holding it locks the folder against other runs.

    `OUT/.deepinfer-prep/` holds `lock`, `journal`, `files/` with everything that has no final name yet, and
    `manifest.json` once all of that is complete and synced: from then on the run is being published. Where bytes
    turn out to have changed since, that file becomes `rejected.json` and the run is repeated from its journal.

    Raises:
        RefusedError: another run holds the folder, or the file system cannot lock.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.root = output / WORKSPACE_NAME
        self.files = self.root / "files"
        self.journal = self.root / "journal"
        self.ready_manifest = self.root / _READY
        self.rejected_manifest = self.root / _REJECTED
        self._lock = _acquire(self.root / "lock")

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.root.exists() and not self.journal.exists():
            self.discard()  # Nothing in it could be resumed.
        with suppress(OSError):  # The lock is given up whatever close says, and nothing was written to the file.
            os.close(self._lock)
        _remove_as_far_as_possible(self.output / DISCARDED_NAME)

    def path(self, name: str) -> Path:
        """Where a file of the output lies until it is published; its folder is made."""
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def clear(self) -> None:
        """Throw away everything that an unfinished run has written, but keep the lock."""
        self.ready_manifest.unlink(missing_ok=True)
        self.rejected_manifest.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        if self.files.exists():
            shutil.rmtree(self.files)

    def discard(self) -> None:
        """Remove the workspace with all that is in it.

        It gets another name first: a run that waits for the lock then finds it gone rather than half removed,
        and what cannot be removed does not fail a finished run (NFS keeps the lock file until it is closed).
        """
        discarded = self.output / DISCARDED_NAME
        _remove_as_far_as_possible(discarded)
        os.replace(self.root, discarded)
        with suppress(OSError):
            sync_folder(self.output)  # Else a power cut could bring it back half removed.
        _remove_as_far_as_possible(discarded)


def _remove_as_far_as_possible(folder: Path) -> None:
    with suppress(OSError):  # A failing close gets through ignore_errors.
        shutil.rmtree(folder, ignore_errors=True)


def _acquire(path: Path) -> int:
    """Open and lock a lock file that other runs may remove at any moment; the descriptor holds the lock."""
    for _ in range(_LOCK_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # Another run removed its workspace between the two calls.
        try:
            _lock(lock, path.parent.parent)
            if _is_same_file(lock, path):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    raise RefusedError(f"{path} is removed as fast as it is made: other conversions run in this folder. Wait.")


def _lock(descriptor: int, output: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RefusedError(
            f"{output}: another conversion is writing to this folder. Wait for it, or choose another output."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise RefusedError(
            f"{output}: its file system cannot lock files ({error.strerror}), so two conversions could write here "
            "at once. Mount it with locks (Lustre: -o flock), or choose another output."
        ) from None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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
            "Choose a separate, empty folder as the output."
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
                f"{source} is a link to {target}, inside the output {output}. Choose another folder as the output."
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
            raise RefusedError(f"{output} is not a folder. Choose a folder as the output.")
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
            f"{output} cannot take the output: {', '.join(taken[:5])} "
            "is a folder where a file has to go, or a file or link where a folder has to go. Move it away, or "
            "choose another output."
        )


def _check_only_own_run(output: Path, identity: Mapping[str, Any]) -> None:
    root = output / WORKSPACE_NAME
    entries = {entry.name for entry in output.iterdir()} - {WORKSPACE_NAME, DISCARDED_NAME}
    found = read_identity(root / "journal")
    if is_same_run(found, identity) and ((root / _READY).exists() or (root / _REJECTED).exists()):
        return  # Its publication was interrupted: files have their final names already.
    if MANIFEST_NAME in entries:
        raise RefusedError(f"{output} already holds a finished output. Use --overwrite to replace it.")
    if found is not None and not is_same_run(found, identity):
        different = [key for key in sorted({*found, *identity}) if found.get(key) != identity.get(key)]
        raise RefusedError(
            f"{output} holds an unfinished run that cannot be resumed: its {', '.join(different)} differ from this "
            "run's. Use --overwrite to start over, or finish it with the source and version that began it."
        )
    if entries:
        raise RefusedError(
            f"{output} is not empty: it holds {', '.join(sorted(entries)[:5])}"
            f"{' and more' if len(entries) > 5 else ''}. Choose an empty folder, or use --overwrite to replace "
            "the safetensors files and indexes in it."
        )


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
            f"{output}: the output needs {needed:,} bytes, of which {written:,} are written already, but its file "
            f"system has {free:,} bytes free. Free some space or choose another output."
        )


def _blocks_bytes(folder: Path) -> int:
    """Disk space that the files below a folder take; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # Another run may be publishing them.
                total += (Path(parent) / name).stat().st_blocks * 512
    return total

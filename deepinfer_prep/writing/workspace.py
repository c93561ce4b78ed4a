"""Where a conversion keeps its files until they are complete, and the lock that keeps a second run away."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.files.storage import sync_folder
from deepinfer_prep.naming import DISCARDED_NAME, WORKSPACE_NAME

READY_NAME, REJECTED_NAME = "manifest.json", "rejected.json"
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
        self.ready_manifest = self.root / READY_NAME
        self.rejected_manifest = self.root / REJECTED_NAME
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
    raise RefusedError(
        f"{path} is removed as fast as it is made: other conversions run in this folder. Wait.", code="locked"
    )


def _lock(descriptor: int, output: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RefusedError(
            f"{output}: another conversion is writing to this folder. Wait for it, or choose another output.",
            code="locked",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise RefusedError(
            f"{output}: its file system cannot lock files ({error.strerror}), so two conversions could write here "
            "at once. Mount it with locks (Lustre: -o flock), or choose another output.",
            code="no-locks",
        ) from None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

"""Where a conversion keeps its files until they are complete, and the lock that keeps a second run away."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.files.folders import Folder, check_tree
from deepinfer_prep.files.storage import DirectWriter, RangeWriter
from deepinfer_prep.naming import DISCARDED_NAME, WORKSPACE_NAME
from deepinfer_prep.writing.journal import JOURNAL_NAME

READY_NAME, READY_DIGEST_NAME, REJECTED_NAME = "manifest.json", "manifest.xxh3", "rejected.json"
FILES_NAME, TOKEN_NAME = "files", "token"
_LOCK = "lock"
_LOCK_ATTEMPTS = 100
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_PRIVATE = 0o700


class Workspace:
    """The unfinished run inside an output folder; holding it locks the folder against other runs.

    `OUT/.deepinfer-prep/` holds `lock`, `journal`, `files/` with everything that has no final name yet, and
    `manifest.json` once all of that is complete and synced: from then on the run is being published. Where bytes
    turn out to have changed since, that file becomes `rejected.json` and the run is repeated from its journal.
    `token` is random, and there where other processes write as well: by it they know this very run.

    Nobody else can read or change it: the folder is closed to others, whatever lies in it already has to be a regular
    file or folder of this user, and all of it is reached through descriptors and never through links.

    Raises:
        RefusedError: another run holds the folder, the file system cannot lock, or something in the workspace is
            somebody else's.
    """

    def __init__(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.output = Folder.open(output)
        try:
            self.root, self._lock = _acquire(self.output)
        except BaseException:
            self.output.close()
            raise
        try:
            check_tree(self.root, _own_uid(self.output, self.root))
            self.files = self.root.enter(FILES_NAME, _PRIVATE)
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # After its publication another run's workspace may stand in this one's place.
            is_here = _is_same(self.output.status(WORKSPACE_NAME), self.root.status())
            if is_here and self.root.status(JOURNAL_NAME) is None:
                self.discard()  # Nothing in it could be resumed.
        finally:
            self.files.close()
            self._release()

    def _release(self) -> None:
        with suppress(OSError):  # The lock is given up whatever close says, and nothing was written to the file.
            os.close(self._lock)
        self._remove_discarded()
        self.root.close()
        self.output.close()

    def path(self, name: str) -> Path:
        """Where a file of the output lies until it is published, for messages and for reading."""
        return self.files.path / name

    @contextmanager
    def holding(self, name: str) -> Iterator[Folder]:
        """The folder that holds a file of the output until it is published, made where it is not there."""
        with self.files.holding(name, _PRIVATE) as folder:
            yield folder

    def holds(self, name: str) -> bool:
        """Whether a file of the output waits here for its publication."""
        try:
            with self.files.holding(name) as folder:
                return folder.status(name.rpartition("/")[2]) is not None
        except FileNotFoundError:
            return False

    def writer(self, name: str) -> RangeWriter:
        """Open a file of the output for writing."""
        with self.holding(name) as folder:
            return RangeWriter(self.path(name), folder.open_own)

    def direct_writer(self, name: str) -> DirectWriter:
        """Open a file of the output for writing past the page cache."""
        with self.holding(name) as folder:
            return DirectWriter(self.path(name), folder.open_own)

    def write_durably(self, name: str, data: bytes) -> None:
        """Write a small file of the workspace in full under a fresh name, sync it, and give it its name."""
        fresh = f"{name}.{os.urandom(8).hex()}.tmp"

        def open_fresh(path: Path, flags: int, mode: int) -> int:
            return self.root.open_own(path, flags | os.O_EXCL, mode)

        with RangeWriter(self.root.path / fresh, open_fresh) as file:
            file.allocate(len(data))
            file.write_from(memoryview(data), 0)
            file.sync()
        self.root.replace(fresh, self.root, name)
        self.root.sync()

    def clear(self) -> None:
        """Throw away everything that an unfinished run has written, but keep the lock."""
        # The token first: a process elsewhere that still finds it has opened files that are removed after it.
        for name in (TOKEN_NAME, READY_NAME, READY_DIGEST_NAME, REJECTED_NAME, JOURNAL_NAME):
            self.root.unlink(name, missing_ok=True)
        self.files.close()
        self.root.remove_tree(FILES_NAME)
        self.files = self.root.enter(FILES_NAME, _PRIVATE)

    def discard(self) -> None:
        """Remove the workspace with all that is in it.

        It gets another name first: a run that waits for the lock then finds it gone rather than half removed,
        and what cannot be removed does not fail a finished run (NFS keeps the lock file until it is closed).
        """
        self._set_aside()
        with suppress(OSError):
            self.output.sync()  # Else a power cut could bring it back half removed.
        self._remove_discarded()

    def _set_aside(self) -> None:
        for attempt in range(_LOCK_ATTEMPTS):
            self._remove_discarded()
            try:
                self.output.replace(WORKSPACE_NAME, self.output, DISCARDED_NAME)
            except OSError as error:  # Another run is just removing one that it had discarded.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt + 1 == _LOCK_ATTEMPTS:
                    raise
            else:
                return

    def _remove_discarded(self) -> None:
        with suppress(OSError):
            self.output.remove_tree(DISCARDED_NAME)


def _own_uid(output: Folder, root: Folder) -> int:
    """The user that new files in the output belong to: on some file systems it is not the one of this process."""
    status = root.status()
    if status is not None and status.st_uid == os.geteuid():
        return status.st_uid
    name = f"{WORKSPACE_NAME}.{os.urandom(8).hex()}"
    descriptor = output.open_own(output.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        output.unlink(name, missing_ok=True)


def _acquire(output: Folder) -> tuple[Folder, int]:
    """Open and lock a workspace that other runs may remove at any moment; the descriptor holds the lock."""
    for _ in range(_LOCK_ATTEMPTS):
        with suppress(FileNotFoundError):  # Another run removed its workspace meanwhile.
            root = output.enter(WORKSPACE_NAME, _PRIVATE)
            try:
                lock = root.open_own(root.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
                try:
                    _lock(lock, output.path)
                    if _is_same(root.status(_LOCK), os.fstat(lock)) and _is_same(
                        output.status(WORKSPACE_NAME), root.status()
                    ):
                        return root, lock
                except BaseException:
                    os.close(lock)
                    raise
                os.close(lock)
            except BaseException:
                root.close()
                raise
            root.close()
    raise RefusedError(
        f"{output.path / WORKSPACE_NAME} is removed as fast as it is made: other conversions run in this folder. Wait.",
        code="locked",
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
            raise RefusedError(
                f"{output}: the lock that keeps two conversions apart could not be taken ({error.strerror} "
                f"[{errno.errorcode.get(error.errno or 0, error.errno)}]). Try again, or choose an output on another "
                "file system.",
                code="no-locks",
            ) from None
        raise RefusedError(
            f"{output}: its file system cannot lock files ({error.strerror}), so two conversions could write here "
            "at once. Mount it with locks (Lustre: -o flock), or choose another output.",
            code="no-locks",
        ) from None


def _is_same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    return one is not None and other is not None and os.path.samestat(one, other)

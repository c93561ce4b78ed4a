"""Folders that are held open, so that names in them mean the same files whatever others do to their paths.

A path is looked up anew at each use: in a folder that someone else can write to, any part of it may have become a link
meanwhile. A descriptor stays with the folder that was opened, and nothing here follows a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.files.untrusted import read_descriptor

_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR)


class Folder:
    """A folder that is open; `path` is for messages."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._fd = descriptor

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open a folder that a person named: here, and only here, links are followed.

        Raises:
            OSError: it is no folder, or cannot be opened.
        """
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def enter(self, name: str, create_mode: int | None = None) -> Folder:
        """Open a folder in this one, which is made where a mode is given.

        Raises:
            RefusedError: it is a link or no folder.
            FileNotFoundError: it is not there.
        """
        if create_mode is not None:
            with suppress(FileExistsError), self._named(name):
                os.mkdir(name, create_mode, dir_fd=self._fd)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with self._named(name):
                return Folder(self.path / name, os.open(name, flags, dir_fd=self._fd))
        except OSError as error:
            if error.errno in _NO_FOLDER:
                raise RefusedError(
                    f"{self.path / name} is a link or a file where a folder of this conversion has to be. "
                    "Find out who put it there, remove it, or choose another output.",
                    code="foreign-file",
                ) from None
            raise

    @contextmanager
    def holding(self, name: str, create_mode: int | None = None) -> Iterator[Folder]:
        """The folder that holds a file below this one: for "a/b/c" that is "a/b"."""
        folder = Folder(self.path, os.dup(self._fd))
        try:
            for part in name.split("/")[:-1]:
                below = folder.enter(part, create_mode)
                folder.close()
                folder = below
            yield folder
        finally:
            folder.close()

    def status(self, name: str = "") -> os.stat_result | None:
        """What the system says of an entry (links are not followed), or of the folder itself; None where none is."""
        if not name:
            return os.fstat(self._fd)
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """The names of all entries, sorted."""
        return sorted(os.listdir(self._fd))

    def open_own(self, path: Path, flags: int, mode: int = 0o666) -> int:
        """Open a file right in this folder; `path` ends in its name, as `RangeWriter` calls its opener.

        Raises:
            RefusedError: it is no regular file with this one name only.
            OSError: it cannot be opened.
        """
        try:
            with self._named(path.name):
                descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=self._fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise _foreign(self.path / path.name, "is no regular file") from None
            raise
        try:
            check_own_file(self.path / path.name, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, most_bytes: int) -> bytes:
        """All bytes of a file right in this folder.

        Raises:
            JsonError: it is too large.
            RefusedError: as `open_own`.
            FileNotFoundError: it is not there.
        """
        descriptor = self.open_own(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_descriptor(descriptor, most_bytes)
        finally:
            with suppress(OSError):  # Nothing was written through it.
                os.close(descriptor)

    def replace(self, name: str, target: Folder, target_name: str) -> None:
        """Give a file another name, in place of whatever has it there."""
        with self._named(name):
            os.replace(name, target_name, src_dir_fd=self._fd, dst_dir_fd=target._fd)

    def unlink(self, name: str, missing_ok: bool = False) -> None:
        """Remove a file or link."""
        try:
            with self._named(name):
                os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self, name: str) -> None:
        """Remove a folder and all that is in it.

        Raises:
            OSError: something could not be removed; all the rest was.
        """
        failure: OSError | None = None
        try:
            folder = self.enter(name)
        except FileNotFoundError:
            return
        except RefusedError:
            self.unlink(name)
            return
        try:
            for entry in folder.names():
                try:
                    status = folder.status(entry)
                    if status is not None and stat.S_ISDIR(status.st_mode):
                        folder.remove_tree(entry)
                    else:
                        folder.unlink(entry, missing_ok=True)
                except OSError as error:
                    failure = failure or error
        finally:
            folder.close()
        if failure is not None:
            raise failure
        with self._named(name):
            os.rmdir(name, dir_fd=self._fd)

    def restrict(self, mode: int) -> None:
        """Set the folder's own permissions."""
        os.fchmod(self._fd, mode)

    def sync(self) -> None:
        """Make the entries (new names, renames) durable, where the file system can sync a folder.

        Raises:
            OSError: the file system reported a failed write.
        """
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                error.filename = error.filename or str(self.path)
                raise

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let an OSError name the whole path: calls relative to a folder know only the last part."""
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path / name), None
            raise

    def close(self) -> None:
        """Close the descriptor; later calls do nothing."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            with suppress(OSError):  # Nothing was written through it.
                os.close(descriptor)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_own_file(path: Path, status: os.stat_result) -> None:
    """Refuse what is no regular file, or has a second name that may be somebody else's.

    Raises:
        RefusedError: it is one of these.
    """
    if not stat.S_ISREG(status.st_mode):
        raise _foreign(path, "is no regular file")
    if status.st_nlink > 1:
        raise _foreign(path, "is a file with more than one name (a hard link)")


def check_tree(folder: Folder, owner: int) -> None:
    """Refuse a folder with anything in it but regular files and folders of one user.

    Folders that others may write to are closed to them first, so that what was checked stays so.

    Raises:
        RefusedError: something else lies in it, which is named.
    """
    status = folder.status()
    if status is None or status.st_uid != owner:
        raise _foreign(folder.path, "belongs to another user")
    if status.st_mode & 0o077:
        folder.restrict(0o700)
    for name in folder.names():
        status = folder.status(name)
        if status is None:
            continue
        if stat.S_ISDIR(status.st_mode):
            with folder.enter(name) as below:
                check_tree(below, owner)
        else:
            check_own_file(folder.path / name, status)
            if status.st_uid != owner:
                raise _foreign(folder.path / name, "belongs to another user")


def _foreign(path: Path, problem: str) -> RefusedError:
    return RefusedError(
        f"{path} {problem}: this conversion did not write it, and whoever did could let it write elsewhere or publish "
        "what was never computed. Find out where it comes from, remove it, or choose another output.",
        code="foreign-file",
    )

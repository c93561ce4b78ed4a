"""Files of a store as places: a listing that is taken once, and paths that answer from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.files.storage import FileState, Reader, StoredPlace
from deepinfer_prep.naming import SHARD_SUFFIX
from deepinfer_prep.remote.reading import RangeStore, RemoteReader


class Store(RangeStore, Protocol):
    """Files by name below one root; picklable and hashable, and safe to use from several threads."""

    @property
    def is_pinned(self) -> bool:
        """Whether the address names a state that cannot change."""

    def url(self, name: str) -> str:
        """The address of a file or folder, for people."""

    def list(self) -> Mapping[str, FileState]:
        """Every file by its name relative to the root."""

    def state(self, name: str) -> FileState:
        """The state of one file now.

        Raises:
            FileNotFoundError: there is no such file.
        """


class _Listing:
    """What a store holds, asked for once."""

    def __init__(self, store: Store, known: Mapping[str, FileState] | None = None) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._files = known

    @property
    def files(self) -> Mapping[str, FileState]:
        """Every file by name, plain relative names only."""
        with self._lock:
            if self._files is None:
                files = self._store.list()
                for name in files:
                    self._check(name, files)
                self._files = files
            return self._files

    def _check(self, name: str, files: Mapping[str, FileState]) -> None:
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"{self._store.url(name)} has a name that no file below a folder can have. Rename or remove it.",
                code="bad-name",
            )
        if any("/".join(parts[:count]) in files for count in range(1, len(parts))):
            raise CheckpointError(
                f"{self._store.url(name)} lies below a name that is a file as well, which no folder can hold. Rename "
                "or remove one of the two.",
                code="bad-name",
            )


def path_in(make_store: Callable[[str], Store], key: str) -> RemotePath:
    """The place of a key: a folder, or one shard in the folder that holds it.

    Args:
        make_store: makes the store whose root is a prefix, which is empty or ends with a slash.
    """
    key = key.strip("/")
    if key.endswith(SHARD_SUFFIX):
        folder, slash, name = key.rpartition("/")
        return RemotePath(make_store(folder + slash), name)
    return RemotePath(make_store(f"{key}/" if key else ""), "")


class RemotePath(StoredPlace):
    """A file or folder of a store; `key` is relative to the store's root."""

    def __init__(self, store: Store, key: str, listing: _Listing | None = None) -> None:
        self.store = store
        self.key = key
        self._listing = listing or _Listing(store)

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._listing.files.get(self.key)
        return (_restore, (self.store, self.key, None if state is None else {self.key: state}))

    def __str__(self) -> str:
        return self.store.url(self.key)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self.store, self.key) == (other.store, other.key)

    def __hash__(self) -> int:
        return hash((self.store, self.key))

    @property
    def name(self) -> str:
        """The last part of its path."""
        return str(self).rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that holds it; the root's is the root."""
        return RemotePath(self.store, self.key.rpartition("/")[0], self._listing)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.store, f"{self.key}/{name}" if self.key else name, self._listing)

    @property
    def pinned_url(self) -> str:
        """Its address, where that names a commit."""
        return str(self) if self.store.is_pinned else ""

    def is_file(self) -> bool:
        """Whether the listing has a file of this name."""
        return self.key in self._listing.files

    def is_dir(self) -> bool:
        """Whether the listing has a file below this name."""
        prefix = f"{self.key}/" if self.key else ""
        return any(name.startswith(prefix) for name in self._listing.files)

    def iterdir(self) -> Iterable[RemotePath]:
        """The files and folders right below it."""
        prefix = f"{self.key}/" if self.key else ""
        below = (name[len(prefix) :] for name in self._listing.files if name.startswith(prefix))
        return [self / name for name in dict.fromkeys(name.partition("/")[0] for name in below)]

    def read_bytes(self) -> bytes:
        """All of a small file."""
        buffer = bytearray(self.state().size)
        reader = self.open_reader()
        try:
            reader.read_into(memoryview(buffer), 0)
        finally:
            reader.close()
        return bytes(buffer)

    def state(self) -> FileState:
        """The state in the listing."""
        found = self._listing.files.get(self.key)
        if found is None:
            raise FileNotFoundError(2, "No such file", str(self))
        return found

    def state_now(self) -> FileState:
        """The state that the store tells now."""
        return self.store.state(self.key)

    def open_reader(self) -> Reader:
        """Open the file in the state of the listing."""
        return RemoteReader(self, self.store, self.key, self.state())


def _restore(store: Store, key: str, known: Mapping[str, FileState] | None) -> RemotePath:
    return RemotePath(store, key, _Listing(store, known))

"""Writes blocks into the workspace of a run that another process holds, on this machine or on another one.

Such a process may live on when its run has ended: after a break in the network the cluster repeats its work elsewhere.
It then opens what is there and makes nothing, and after opening a file it asks whether the workspace is still that of
its run. So its late bytes go to a file of its own run, where the same bytes stand or are to stand, or to one that was
removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError
from deepinfer_prep.files.digests import digest_range
from deepinfer_prep.files.folders import Folder
from deepinfer_prep.files.storage import DirectWriter
from deepinfer_prep.naming import WORKSPACE_NAME
from deepinfer_prep.writing.journal import SegmentDone
from deepinfer_prep.writing.target import Block, Chunks
from deepinfer_prep.writing.workspace import FILES_NAME, TOKEN_NAME, Workspace

_TOKEN_BYTES = 64


class SharedWriter:
    """The workspace in a shared folder as `BlockWriter`; what `put` returns from is synced."""

    def __init__(self, output: Path, token: str) -> None:
        self._output = output
        self._token = token

    def check(self) -> None:
        """Make sure that the output folder, as it is seen from here, is the one that the run writes to.

        Raises:
            ConversionError: it is not.
        """
        try:
            with Folder.open(self._output) as output, output.enter(WORKSPACE_NAME) as root:
                self._require_token(root)
        except FileNotFoundError:
            raise self._other_place() from None

    def buffer_bytes(self, chunk_size: int, sizes: Iterable[int]) -> int:
        """What is read at once is written at once."""
        return chunk_size

    def is_intact(self, block: Block, earlier: Sequence[SegmentDone], buffer: fp8.U8) -> bool:
        """Whether the bytes on disk have the digest that the journal states."""
        (done,) = earlier
        with self._open(block.name) as file:
            try:
                return digest_range(file, block.start, block.end, buffer) == done.digest
            except OSError:
                return False  # What cannot be read any more is written again.

    def put(self, block: Block, chunks: Chunks) -> str:
        """Write a block into its file, and sync it."""
        with self._open(block.name) as file:
            file.reserve(block.start, block.end)
            for offset, chunk in chunks:
                file.write_from(chunk.data, offset)
            file.sync()
        return ""

    def sync(self, name: str) -> None:
        """Nothing: every block was synced where it was written."""

    def close_file(self, name: str) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is open."""

    @contextmanager
    def _open(self, name: str) -> Iterator[DirectWriter]:
        try:
            with Folder.open(self._output) as output, output.enter(WORKSPACE_NAME) as root:
                with root.enter(FILES_NAME) as files, files.holding(name) as folder:

                    def open_existing(path: Path, flags: int, mode: int) -> int:
                        return folder.open_own(path, flags & ~os.O_CREAT, mode)

                    file = DirectWriter(folder.path / name.rpartition("/")[2], open_existing)
                try:
                    self._require_token(root)
                except BaseException:
                    file.close()
                    raise
        except FileNotFoundError:
            raise self._other_place() from None
        with file:
            yield file

    def _require_token(self, root: Folder) -> None:
        if root.read(TOKEN_NAME, _TOKEN_BYTES).decode("latin-1") != self._token:
            raise self._other_place()

    def _other_place(self) -> ConversionError:
        return ConversionError(
            f"{self._output} is not the folder that the run writes to, or its run has ended: every node has to see the "
            "same output folder under this path. Mount the shared file system there, or choose an output at "
            "s3://bucket/prefix.",
            code="other-place",
        )


def share_workspace(workspace: Workspace, sizes: Iterable[tuple[str, int]]) -> SharedWriter:
    """A writer for other processes.

    Args:
        sizes: name and size of every file; each is made at its size, as the writer makes none.
    """
    token = os.urandom(16).hex()
    workspace.write_durably(TOKEN_NAME, token.encode())
    for name, size in sizes:
        with workspace.writer(name) as file:
            file.resize(size)
    return SharedWriter(Path(os.path.abspath(workspace.output.path)), token)

"""Sends blocks to an object store: parts of multipart uploads, and small files whole."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError
from deepinfer_prep.files import segments
from deepinfer_prep.remote import checksums
from deepinfer_prep.remote.s3 import client
from deepinfer_prep.remote.s3_workspace import S3Workspace, Stored
from deepinfer_prep.writing.journal import SegmentDone
from deepinfer_prep.writing.target import Block, Chunks

MOST_PARTS = 10_000
"""Parts of an upload, by the rules of S3."""


def block_bytes(size: int) -> int:
    """Bytes of a part of a file: one segment; more where the file would have too many parts."""
    return segments.SEGMENT_BYTES * max(1, -(-size // (segments.SEGMENT_BYTES * MOST_PARTS)))


def is_small(size: int) -> bool:
    """Whether a file is sent whole."""
    return size <= block_bytes(size)


class S3Writer:
    """A workspace in a store as `BlockWriter`; any number of processes may send parts of the same run."""

    def __init__(self, workspace: S3Workspace) -> None:
        self._workspace = workspace
        self._uploads: dict[str, Upload] = {}
        self._small: dict[str, Stored] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Writer, (self._workspace,)

    def check(self) -> None:
        """Make sure that the store, as it is seen from here, holds the run.

        Raises:
            PrepError: it does not, or cannot be read with this process's credentials.
        """
        store = self._workspace.store
        found = self._workspace.read_run()
        if found is None or found[0] != self._workspace.run_id:
            raise ConversionError(
                f"{store.url('')} does not hold the run that is under way: AWS_ENDPOINT_URL, AWS_PROFILE or the region "
                "lead elsewhere here, or another run has taken its place.",
                code="other-place",
            )

    def buffer_bytes(self, chunk_size: int, sizes: Iterable[int]) -> int:
        """A part is sent as a whole."""
        return max([chunk_size, *(min(block_bytes(size), size) for size in sizes)])

    def is_intact(self, block: Block, earlier: Sequence[SegmentDone], buffer: fp8.U8) -> bool:
        """Whether the store lists the part or object with the ETag that the journal states."""
        return self._found(block) == Stored(block.nbytes, earlier[0].etag)

    def put(self, block: Block, chunks: Chunks) -> str:
        """Send a block, unless the store has it already from a run that was killed before it could record it."""
        data = _joined(chunks, block.nbytes)
        found = self._found(block)
        if found is None or found.size != len(data) or not checksums.has_etag(data, found.etag):
            found = self._send(block, data)
        return found.etag

    def sync(self, name: str) -> None:
        """Nothing: a store keeps what it has confirmed."""

    def close_file(self, name: str) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is open."""

    def upload(self, name: str, start: bool = True) -> Upload:
        """The upload of a large file; an empty one where none was begun and `start` does not say to."""
        with self._lock:
            upload = self._uploads.setdefault(name, Upload())
        with upload.lock:
            if not upload.upload:
                upload.open(self._workspace, name, start)
        return upload

    def _found(self, block: Block) -> Stored | None:
        if is_small(block.size):
            with self._lock:
                if self._small is None:
                    self._small = self._workspace.small_files()
                return self._small.get(block.name)
        return self.upload(block.name).parts.get(_part(block))

    def _send(self, block: Block, data: memoryview) -> Stored:
        if is_small(block.size):
            return self._workspace.put_small(block.name, data)
        upload, store = self.upload(block.name), self._workspace.store
        checks = checksums.arguments(data, self._workspace.knows_crc64)
        try:
            with store.explained("UploadPart", block.name):
                answer = client().upload_part(
                    Bucket=store.bucket,
                    Key=store.prefix + block.name,
                    UploadId=upload.upload,
                    PartNumber=_part(block),
                    Body=checksums.Body(data),
                    ContentLength=len(data),
                    **checks,
                )
        except FileNotFoundError:
            raise ConversionError(
                f"{store.url('')}: the upload of {block.name} is gone: another run of the same conversion has "
                "published it, or somebody aborted it. Run the command again.",
                code="vanished",
            ) from None
        stored = Stored(len(data), answer["ETag"])
        upload.parts[_part(block)] = stored
        return stored


class Upload:
    """The multipart upload of one file: its id and the parts that the store has."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.upload = ""
        self.parts: dict[int, Stored] = {}

    def open(self, workspace: S3Workspace, name: str, start: bool) -> None:
        """Find the upload that a run began, with its parts; begin one where there is none and `start` says so."""
        upload = workspace.find_upload(name)
        parts = None if upload is None else workspace.list_parts(name, upload)
        if parts is None and start:
            upload = workspace.start_upload(name) if upload is None else workspace.restart_upload(name)
            parts = workspace.list_parts(name, upload)
        if upload is not None and parts is not None:
            self.upload, self.parts = upload, parts


def _part(block: Block) -> int:
    return block.start // block_bytes(block.size) + 1


def _joined(chunks: Chunks, size: int) -> memoryview:
    """All bytes of a block; without a copy where they come in one piece, as from a buffer of `buffer_bytes`."""
    pieces = bytearray()
    for _, chunk in chunks:
        if chunk.size == size:
            return chunk.data
        pieces += chunk.data
    return memoryview(pieces)

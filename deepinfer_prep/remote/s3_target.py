"""An output below a prefix of an object store: a segment is a part of a multipart upload, and nothing is local.

A file of one segment is one object of the workspace, and publication copies it to its name. A larger file is an
upload, which publication completes: until then the store shows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError, ManifestError, RefusedError, list_some
from deepinfer_prep.files.digests import SegmentDigests
from deepinfer_prep.files.storage import Place, StoredPlace
from deepinfer_prep.manifest import FileRecord, Manifest, parse_manifest
from deepinfer_prep.naming import INDEX_SUFFIX, MANIFEST_NAME, SHARD_SUFFIX, SIDECAR_FOLDER
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.remote.s3 import S3Store, client
from deepinfer_prep.remote.s3_workspace import ROOT, RUN_KEY, S3Workspace, Stored, in_parallel
from deepinfer_prep.remote.s3_writer import S3Writer, block_bytes, is_small
from deepinfer_prep.remote.tree import RemotePath
from deepinfer_prep.workers import ProgressCallback
from deepinfer_prep.writing.computed_bytes import ComputedBytes
from deepinfer_prep.writing.journal import SegmentDone, is_same_run
from deepinfer_prep.writing.target import blocks


class S3Target:
    """A prefix as `Target`."""

    def __init__(self, place: RemotePath, store: S3Store) -> None:
        self.place: Place = place
        self._store = store

    def check_separate(self, source: Place) -> None:
        """Refuse an output whose prefix is the source's, lies below it or holds it."""
        if not isinstance(source, RemotePath) or not isinstance(source.store, S3Store):
            return
        one, other = source.store, self._store
        is_inside = one.prefix.startswith(other.prefix) or other.prefix.startswith(one.prefix)
        if one.bucket == other.bucket and is_inside:
            raise RefusedError(
                f"the output {self.place} and the source {source} are the same prefix or lie inside one another. "
                "Choose a separate, empty prefix as the output.",
                code="same-folder",
            )

    def check_sources(self, sources: Iterable[Place]) -> None:
        """Nothing: stores have no links."""

    def check_usable(self, identity: Mapping[str, Any], names: Sequence[str], overwrite: bool) -> None:
        """Refuse a prefix that holds anything but an unfinished run of the same conversion."""
        if overwrite:
            return
        entries = [name for name, _ in self._store.list_below("")]
        found = [name for name in entries if not name.startswith(ROOT) and not name.endswith("/")]
        workspace = S3Workspace(self._store)
        run = workspace.read_run() if len(found) < len(entries) else None
        is_same = run is not None and is_same_run(run[1], identity)
        if is_same and workspace.read_ready() is not None:
            return  # Its publication was interrupted: files have their final names already.
        if MANIFEST_NAME in found:
            raise RefusedError(
                f"{self.place} already holds a finished output. Use --overwrite to replace it.", code="finished-output"
            )
        if run is not None and not is_same:
            different = [key for key in sorted({*run[1], *identity}) if run[1].get(key) != identity.get(key)]
            raise RefusedError(
                f"{self.place} holds an unfinished run that cannot be resumed: its {', '.join(different)} differ from "
                "this run's. Use --overwrite to start over, `deepinfer-prep discard` to remove it, or finish it with "
                "the source and version that began it.",
                code="other-run",
            )
        if found:
            raise RefusedError(
                f"{self.place} is not empty: it holds {list_some(sorted(found), 5)}. Choose an empty prefix, or use "
                "--overwrite to replace the safetensors files and indexes in it.",
                code="not-empty",
            )

    def check_space(self, needed: int) -> None:
        """Nothing: a store has room."""

    @contextmanager
    def hold(self, identity: Mapping[str, Any], files: Sequence[OutputFile], overwrite: bool) -> Iterator[S3Run]:
        """Begin a run or go on with one; two equal runs may go on side by side."""
        self.check_usable(identity, [file.name for file in files], overwrite)
        workspace = S3Workspace(self._store)
        workspace.prepare(identity)
        yield S3Run(self.place, workspace)

    def discard(self) -> bool:
        """Abort every unfinished upload below the prefix and remove the workspace."""
        return S3Workspace(self._store).clear()


class S3Run:
    """A workspace in a store as `Run`."""

    def __init__(self, place: Place, workspace: S3Workspace) -> None:
        self._place = place
        self._workspace = workspace
        self.writer = S3Writer(workspace)
        self._small: dict[str, Stored] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the store cannot do."""
        return self._workspace.warnings

    def resume_publication(self, workers: int, chunk_size: int, progress: ProgressCallback | None) -> Manifest | None:
        """The ready manifest, where each of its files is published, uploaded or in the workspace."""
        text = self._workspace.read_ready()
        if text is None:
            return None
        try:
            manifest = parse_manifest(text, self._place)
        except ManifestError:
            manifest = None
        self._small = self._workspace.small_files()
        if manifest is not None and all(in_parallel(lambda item: self._is_there(*item), manifest.files.items())):
            return manifest
        self._workspace.reject_ready()
        return None

    def _is_there(self, name: str, record: FileRecord) -> bool:
        if name in self._small and self._small[name].size == record.size:
            return True
        if not is_small(record.size):
            parts = self.writer.upload(name, start=False).parts
            if sum(part.size for part in parts.values()) == record.size:
                return True
        return self._is_published(name, record.size)

    def _is_published(self, name: str, size: int) -> bool:
        try:
            state, metadata = self._workspace.store.head(name)
        except FileNotFoundError:
            return False
        return state.size == size and metadata.get(RUN_KEY) == self._workspace.run_id

    def read_done(self) -> dict[tuple[str, int], SegmentDone]:
        """What the journals of equal runs say."""
        return self._workspace.read_journal()

    def block_bytes(self, size: int) -> int:
        """One part."""
        return block_bytes(size)

    def share(self) -> S3Writer:
        """The same writer: nothing of it is bound to a process."""
        return self.writer

    def record(self, done: Sequence[SegmentDone]) -> None:
        """Add an object to the journal."""
        if done:
            self._workspace.record(done)

    def put_file(self, name: str, size: int, chunks: Iterable[fp8.U8]) -> FileRecord:
        """Send a whole file, a block at a time."""
        digests, source = SegmentDigests(), iter(chunks)
        rest: fp8.U8 = np.empty(0, dtype=np.uint8)
        for block in blocks(name, size, block_bytes(size)):
            data, rest = _fill(rest, source, block.nbytes)
            digests.update(data)
            self.writer.put(block, iter([(block.start, data)]))
        return FileRecord(size, digests.digests())

    def written(self, file: OutputFile) -> ComputedBytes:
        """Parts cannot be read back, so the bytes are computed again."""
        return ComputedBytes(file)

    def publish(self, manifest: Manifest) -> None:
        """Complete every upload, then copy the indexes, then write the manifest, and remove the workspace.

        Raises:
            PrepError: a step failed; the same command goes on from there.
        """
        workspace, text = self._workspace, manifest.to_json()
        self._require_run(len(text))
        workspace.write_ready(text)
        if not self._is_published(MANIFEST_NAME, len(text)):
            workspace.delete([MANIFEST_NAME])
        workspace.delete(self._older(manifest))
        names = sorted(manifest.files)
        for is_index in (False, True):
            wanted = [name for name in names if name.endswith(INDEX_SUFFIX) is is_index]
            in_parallel(lambda name: self._publish_file(name, manifest.files[name].size), wanted)
        workspace.put_object(MANIFEST_NAME, memoryview(text))
        workspace.clear()

    def _require_run(self, manifest_size: int) -> None:
        """Stop before anything is removed where the prefix is another run's by now.

        Two that begin at the same moment may each take the other's beginnings for what an older run left.
        """
        run = self._workspace.read_run()
        if run is not None and run[0] == self._workspace.run_id:
            return
        if run is None and self._is_published(MANIFEST_NAME, manifest_size):
            return  # By an equal run beside this one, which has tidied up.
        raise ConversionError(
            f"{self._place}: another conversion has taken this prefix over since this one began. What it wrote is as "
            "it was. Run the command again.",
            code="taken-over",
        )

    def _older(self, manifest: Manifest) -> list[str]:
        """Indexes, which are written again last, and shards that are not of this output.

        What an equal run beside this one has published already is not older: nothing could bring it back.
        """
        found = [name for name, _ in self._workspace.store.list_below("")]
        here = [name for name in found if name.rpartition("/")[0] in ("", SIDECAR_FOLDER)]
        shards = [name for name in here if name.endswith(SHARD_SUFFIX) and name not in manifest.files]
        indexes = (name for name in here if name.endswith(INDEX_SUFFIX))
        return [name for name in indexes if not self._is_own(name, manifest)] + shards

    def _is_own(self, name: str, manifest: Manifest) -> bool:
        return name in manifest.files and self._is_published(name, manifest.files[name].size)

    def _publish_file(self, name: str, size: int) -> None:
        if is_small(size):
            try:
                self._workspace.copy_small(name)
            except FileNotFoundError:
                self._require_published(name, size)
            return
        upload, store = self.writer.upload(name, start=False), self._workspace.store
        if sum(part.size for part in upload.parts.values()) != size:
            self._require_published(name, size)
            return
        parts = [{"PartNumber": number, "ETag": upload.parts[number].etag} for number in sorted(upload.parts)]
        try:
            with store.explained("CompleteMultipartUpload", name):
                client().complete_multipart_upload(
                    Bucket=store.bucket,
                    Key=store.prefix + name,
                    UploadId=upload.upload,
                    MultipartUpload={"Parts": parts},
                )
        except FileNotFoundError:
            self._require_published(name, size)

    def _require_published(self, name: str, size: int) -> None:
        if not self._is_published(name, size):
            raise ConversionError(
                f"{self._workspace.store.url(name)} vanished while the output was being completed: its upload was "
                "aborted, or its parts were removed. Run the command again.",
                code="vanished",
            )


def _fill(rest: fp8.U8, source: Iterator[fp8.U8], size: int) -> tuple[fp8.U8, fp8.U8]:
    """The next `size` bytes of a stream, and what its last piece holds beyond them."""
    data = np.empty(size, dtype=np.uint8)
    position = 0
    while position < size:
        if not rest.size:
            rest = next(source)
        part = rest[: size - position]
        data[position : position + part.size] = part
        position, rest = position + part.size, rest[part.size :]
    return data, rest


def open_s3_target(place: StoredPlace) -> S3Target:
    """The output at an s3:// place.

    Raises:
        RefusedError: it names one file.
    """
    if not isinstance(place, RemotePath) or not isinstance(place.store, S3Store) or place.key:
        raise RefusedError(f"{place} is not a folder. Give a prefix, s3://bucket/prefix.", code="not-a-folder")
    return S3Target(place, place.store)

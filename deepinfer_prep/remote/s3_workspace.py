"""The unfinished run inside an output's prefix: identity, upload ids, journal, small files, and the ready manifest.

    .deepinfer-prep/run.json          who writes here: the run's identity and a random id
    .deepinfer-prep/uploads/ID/NAME   the id of the multipart upload of a large file
    .deepinfer-prep/files/ID/NAME     a small file, whole; publication copies it to its name
    .deepinfer-prep/journal/P-N       segments that are stored, one JSON object a line; each process P numbers its own
    .deepinfer-prep/manifest.json     there from the moment when everything is uploaded: the run is being published

Objects are never appended to and hardly ever replaced, so that two equal runs can work side by side. ID is the run's:
what a process of an earlier run sends late lies beside what a later one takes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.files.storage import FileState
from deepinfer_prep.naming import WORKSPACE_NAME
from deepinfer_prep.remote import checksums
from deepinfer_prep.remote.s3 import S3Store, client
from deepinfer_prep.writing.journal import SegmentDone, decode_segment, encode_segment, is_same_run

RUN_KEY = "deepinfer-prep-run"
"""Metadata of every object of an output: the id of the run that wrote it."""
_AT_ONCE = 16
_FORMAT = 1
ROOT = WORKSPACE_NAME + "/"
_RUN, _READY = ROOT + "run.json", ROOT + "manifest.json"
_JOURNAL = ROOT + "journal/"


@dataclass(frozen=True, slots=True)
class Stored:
    """A part or small object that is in the store."""

    size: int
    etag: str


class S3Workspace:
    """Reads and writes the objects of one run; `prepare` comes first."""

    def __init__(self, store: S3Store) -> None:
        self.store = store
        self.run_id = ""
        self.knows_crc64 = False
        self.is_exclusive = False
        """Whether the store honours conditions on writes."""
        self._process = uuid.uuid4().hex[:12]
        self._entries = 0

    @property
    def _uploads(self) -> str:
        return f"{ROOT}uploads/{self.run_id}/"

    @property
    def _files(self) -> str:
        return f"{ROOT}files/{self.run_id}/"

    def read_run(self) -> tuple[str, Mapping[str, Any]] | None:
        """Id and identity of the run that is here, None where there is none."""
        text = self.get(_RUN)
        if text is None:
            return None
        try:
            found = json.loads(text)
            return (found["id"], found["identity"]) if found["format"] == _FORMAT else ("", {})
        except (ValueError, KeyError, TypeError):
            return "", {}

    def prepare(self, identity: Mapping[str, Any]) -> None:
        """Go on with the run that is here where its identity is this one; else remove it and begin anew.

        Raises:
            RefusedError: another run began here at the same moment.
        """
        found = self.read_run()
        if found is None or not is_same_run(found[1], identity):
            self.clear()
            found = self._begin(identity)
        self.run_id = found[0]
        # The same object once more: whether the store refuses it tells whether it knows conditions on writes.
        answer = self._put_run(found[0], identity)
        self.is_exclusive = answer is None
        probe = self.put_object(ROOT + "probe", memoryview(b"deepinfer-prep"))
        self.knows_crc64 = "ChecksumCRC64NVME" in probe

    def _begin(self, identity: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        run_id = uuid.uuid4().hex
        if self._put_run(run_id, identity) is not None:
            return run_id, identity
        found = self.read_run()
        if found is None or not is_same_run(found[1], identity):
            raise RefusedError(
                f"{self.store.url('')}: another conversion began to write there at this moment. Wait for it, or "
                "choose another output.",
                code="locked",
            )
        return found

    def _put_run(self, run_id: str, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
        text = json.dumps({"format": _FORMAT, "id": run_id, "identity": identity}).encode()
        return self.put_new(_RUN, text)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the store cannot do."""
        if self.is_exclusive:
            return ()
        return (
            f"{self.store.url('')}: the store does not know conditional writes, so two different conversions into this "
            "prefix at the same time would not notice each other. Make sure that only one runs.",
        )

    # -- objects

    def get(self, name: str) -> bytes | None:
        """All of a small object, None where there is none."""
        try:
            with self.store.explained("GetObject", name):
                answer = client().get_object(Bucket=self.store.bucket, Key=self.store.prefix + name)
                body: bytes = answer["Body"].read()
                return body
        except FileNotFoundError:
            return None

    def put_object(self, name: str, data: memoryview, **more: Any) -> Mapping[str, Any]:
        """Write an object in one request, checked by the store."""
        checks = checksums.arguments(data, self.knows_crc64 or name == ROOT + "probe")
        with self.store.explained("PutObject", name):
            answer: Mapping[str, Any] = client().put_object(
                Bucket=self.store.bucket,
                Key=self.store.prefix + name,
                Body=checksums.Body(data),
                ContentLength=len(data),
                Metadata={RUN_KEY: self.run_id},
                **checks,
                **more,
            )
        return answer

    def put_new(self, name: str, data: bytes) -> Mapping[str, Any] | None:
        """Write an object that must not be there yet; None where it is. Stores without conditions write it anyway."""
        from botocore.exceptions import ClientError

        with self.store.explained("PutObject", name):
            try:
                answer: Mapping[str, Any] = client().put_object(
                    Bucket=self.store.bucket,
                    Key=self.store.prefix + name,
                    Body=data,
                    ContentMD5=checksums.md5(memoryview(data)),
                    IfNoneMatch="*",
                )
                return answer
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code")
                if code in ("PreconditionFailed", "ConditionalRequestConflict", "412"):
                    return None
                if code != "NotImplemented":
                    raise
        return self.put_object(name, memoryview(data))

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that are not there count as removed."""

        def one(name: str) -> None:
            with self.store.explained("DeleteObject", name):
                client().delete_object(Bucket=self.store.bucket, Key=self.store.prefix + name)

        in_parallel(one, names)

    # -- uploads

    def find_upload(self, name: str) -> str | None:
        """The id of the upload of a file that this or an equal run began, None where there is none."""
        known = self.get(self._uploads + name)
        return None if known is None else known.decode()

    def start_upload(self, name: str) -> str:
        """A new upload, or that of an equal run which began one at the same moment."""
        upload = self.create_upload(name)
        if self.put_new(self._uploads + name, upload.encode()) is not None:
            return upload
        self.abort_upload(name, upload)
        return self.find_upload(name) or ""

    def restart_upload(self, name: str) -> str:
        """A new upload in place of one that the store has aborted."""
        upload = self.create_upload(name)
        self.put_object(self._uploads + name, memoryview(upload.encode()))
        return upload

    def create_upload(self, name: str) -> str:
        """Begin a multipart upload."""
        more = {"ChecksumAlgorithm": "CRC64NVME"} if self.knows_crc64 else {}
        with self.store.explained("CreateMultipartUpload", name):
            answer = client().create_multipart_upload(
                Bucket=self.store.bucket, Key=self.store.prefix + name, Metadata={RUN_KEY: self.run_id}, **more
            )
        return str(answer["UploadId"])

    def abort_upload(self, name: str, upload: str) -> None:
        """End an upload and remove its parts."""
        with self.store.explained("AbortMultipartUpload", name):
            _gone_is_fine(
                lambda: client().abort_multipart_upload(
                    Bucket=self.store.bucket, Key=self.store.prefix + name, UploadId=upload
                )
            )

    def list_parts(self, name: str, upload: str) -> dict[int, Stored] | None:
        """The parts that are in the store, by number; None where there is no such upload."""
        from botocore.exceptions import ClientError

        arguments = {"Bucket": self.store.bucket, "Key": self.store.prefix + name, "UploadId": upload}
        parts: dict[int, Stored] = {}
        with self.store.explained("ListParts", name):
            try:
                while True:
                    page = client().list_parts(**arguments)
                    for part in page.get("Parts", ()):
                        parts[part["PartNumber"]] = Stored(part["Size"], part["ETag"])
                    if not page.get("IsTruncated"):
                        return parts
                    arguments["PartNumberMarker"] = page["NextPartNumberMarker"]
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in ("NoSuchUpload", "NoSuchKey"):
                    return None
                raise

    def list_uploads(self) -> Iterator[tuple[str, str]]:
        """Every unfinished upload below the prefix: name and id."""
        arguments: dict[str, Any] = {"Bucket": self.store.bucket, "Prefix": self.store.prefix}
        while True:
            with self.store.explained("ListMultipartUploads", ""):
                page = client().list_multipart_uploads(**arguments)
            for item in page.get("Uploads", ()):
                yield item["Key"][len(self.store.prefix) :], item["UploadId"]
            if not page.get("IsTruncated"):
                return
            arguments |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    # -- journal and small files

    def record(self, done: Sequence[SegmentDone]) -> None:
        """Append segments to the journal."""
        lines = b"".join(json.dumps(encode_segment(item)).encode() + b"\n" for item in done)
        self._entries += 1
        self.put_object(f"{_JOURNAL}{self._process}-{self._entries:08}", memoryview(lines))

    def read_journal(self) -> dict[tuple[str, int], SegmentDone]:
        """What equal runs have recorded."""
        names = [name for name, _ in self.store.list_below(_JOURNAL)]
        found: dict[tuple[str, int], SegmentDone] = {}
        for text in in_parallel(self.get, names):
            for line in (text or b"").splitlines(keepends=True):
                done = decode_segment(line)
                if done is not None and done.etag:
                    found[done.file, done.segment] = done
        return found

    def small_files(self) -> dict[str, Stored]:
        """The small files that are in the store, by name."""
        return {name[len(self._files) :]: Stored(state.size, state.version) for name, state in self._list(self._files)}

    def put_small(self, name: str, data: memoryview) -> Stored:
        """Store a small file."""
        return Stored(len(data), self.put_object(self._files + name, data)["ETag"])

    def copy_small(self, name: str) -> None:
        """Give a small file its final name; it stays here as well."""
        with self.store.explained("CopyObject", name):
            client().copy_object(
                Bucket=self.store.bucket,
                Key=self.store.prefix + name,
                CopySource={"Bucket": self.store.bucket, "Key": self.store.prefix + self._files + name},
            )

    def read_ready(self) -> bytes | None:
        """The manifest of a run that is being published."""
        return self.get(_READY)

    def write_ready(self, text: bytes) -> None:
        """From here on the run is being published."""
        self.put_object(_READY, memoryview(text))

    def reject_ready(self) -> None:
        """What was to be published is not all there any more."""
        self.delete([_READY])

    def clear(self) -> bool:
        """Abort every upload below the prefix and remove the run's objects, its identity last.

        Returns:
            Whether there was anything.
        """
        uploads = list(self.list_uploads())
        in_parallel(lambda item: self.abort_upload(*item), uploads)
        names = [name for name, _ in self.store.list_below(ROOT)]
        self.delete(name for name in names if name != _RUN)
        self.delete(name for name in names if name == _RUN)
        return bool(uploads or names)

    def _list(self, start: str) -> Iterator[tuple[str, FileState]]:
        return self.store.list_below(start)


def in_parallel(work: Any, items: Iterable[Any]) -> list[Any]:
    """work(item) for every item, each of which waits for the store."""
    with ThreadPoolExecutor(_AT_ONCE) as executor:
        return list(executor.map(work, items))


def _gone_is_fine(work: Any) -> None:
    from botocore.exceptions import ClientError

    try:
        work()
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") not in ("NoSuchUpload", "NoSuchKey"):
            raise

"""A prefix of a bucket seen past the code that is checked."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import xxhash

WORKSPACE = ".deepinfer-prep/"


@dataclass(frozen=True)
class Prefix:
    """The objects below `key` of a bucket."""

    bucket: str
    key: str

    @property
    def url(self) -> str:
        """Its address."""
        return f"s3://{self.bucket}/{self.key}"

    def below(self, name: str) -> Prefix:
        """A prefix below this one."""
        return Prefix(self.bucket, f"{self.key}/{name}")

    def upload(self, folder: Path) -> None:
        """Put every file of a folder."""
        s3, files = boto3.client("s3"), [path for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in files:
            s3.upload_file(str(path), self.bucket, f"{self.key}/{path.relative_to(folder)}")

    def objects(self) -> dict[str, tuple[str, str]]:
        """ETag and time of every object but those of unfinished runs, by relative name."""
        return {name: found for name, found in self._all() if not name.startswith(WORKSPACE)}

    def workspace(self) -> list[str]:
        """The objects of unfinished runs."""
        return [name for name, _ in self._all() if name.startswith(WORKSPACE)]

    def uploads(self) -> list[tuple[str, str]]:
        """Unfinished uploads: key and id."""
        s3 = boto3.client("s3")
        pages = s3.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=f"{self.key}/")
        return [(item["Key"], item["UploadId"]) for page in pages for item in page.get("Uploads", ())]

    def parts(self) -> set[tuple[str, int]]:
        """Key and number of each part of unfinished uploads."""
        s3, found = boto3.client("s3"), set()
        for key, upload in self.uploads():
            pages = s3.get_paginator("list_parts").paginate(Bucket=self.bucket, Key=key, UploadId=upload)
            found |= {(key, part["PartNumber"]) for page in pages for part in page.get("Parts", ())}
        return found

    def digests(self) -> dict[str, str]:
        """Digest of every object, as `folder_digests` of a folder."""
        with ThreadPoolExecutor(4) as threads:
            names = list(self.objects())
            return dict(zip(names, threads.map(self._digest, names), strict=True))

    def empty(self) -> None:
        """Remove everything, unfinished uploads too."""
        s3 = boto3.client("s3")
        for key, upload in self.uploads():
            s3.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)
        for name, _ in list(self._all()):
            s3.delete_object(Bucket=self.bucket, Key=f"{self.key}/{name}")

    def _all(self) -> Iterator[tuple[str, tuple[str, str]]]:
        pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.key}/")
        for page in pages:
            for item in page.get("Contents", ()):
                yield item["Key"][len(self.key) + 1 :], (item["ETag"], str(item["LastModified"]))

    def _digest(self, name: str) -> str:
        body: Any = boto3.client("s3").get_object(Bucket=self.bucket, Key=f"{self.key}/{name}")["Body"]
        digest = xxhash.xxh3_128()
        for chunk in body.iter_chunks(1 << 22):
            digest.update(chunk)
        return digest.hexdigest()


def folder_digests(folder: Path) -> dict[str, str]:
    """Digest of every file of a folder by relative name."""
    return {
        str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }

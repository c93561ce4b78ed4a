"""Putting folders into a bucket and reading prefixes back, past the code that is tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.remote.s3_server import BUCKET
from tests.small_files import tree


def upload(client: Any, folder: Path, prefix: str) -> str:
    """Upload a folder; returns its URL."""
    for name, data in tree(folder).items():
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=data)
    return f"s3://{BUCKET}/{prefix}"


def objects(client: Any, prefix: str) -> dict[str, bytes]:
    """Every object below a prefix by relative name."""
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", ())
    names = [item["Key"] for item in found]
    return {name[len(prefix) + 1 :]: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}


def unfinished_uploads(client: Any) -> list[str]:
    """The keys of uploads that are neither completed nor aborted."""
    return [item["Key"] for item in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]

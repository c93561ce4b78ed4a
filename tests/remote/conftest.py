"""Fixtures of the tests of remote places."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepinfer_prep.writing.segment_writer
from deepinfer_prep.files import segments
from deepinfer_prep.remote import reading, s3
from tests.hostile.checkpoints import convert, write_checkpoint
from tests.remote.s3_server import BUCKET, S3Server, admin, running_server
from tests.small_files import tree

SMALL = 4096


@pytest.fixture(scope="session")
def server_process() -> Iterator[S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with running_server() as server:
        yield server


@pytest.fixture
def server(server_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server with one empty bucket, and the environment that leads to it."""
    variables = {
        "AWS_ENDPOINT_URL": server_process.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(reading, "FIRST_PAUSE_SECONDS", 0.001)
    s3._client.cache_clear()
    server_process.rule = None
    client = admin(server_process)
    for bucket in client.list_buckets()["Buckets"]:
        for item in client.list_multipart_uploads(Bucket=bucket["Name"]).get("Uploads", ()):
            client.abort_multipart_upload(Bucket=bucket["Name"], Key=item["Key"], UploadId=item["UploadId"])
        for item in client.list_objects_v2(Bucket=bucket["Name"]).get("Contents", ()):
            client.delete_object(Bucket=bucket["Name"], Key=item["Key"])
        client.delete_bucket(Bucket=bucket["Name"])
    client.create_bucket(Bucket=BUCKET)
    server_process.requests.clear()
    server_process.sent_bytes.clear()
    return server_process


@pytest.fixture
def client(server: S3Server) -> Any:
    return admin(server)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small checkpoint have many segments, each committed on its own."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", SMALL)
    monkeypatch.setattr(deepinfer_prep.writing.segment_writer, "COMMIT_BYTES", 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source")


@pytest.fixture
def expected(small_segments: None, source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What a local run with small segments writes."""
    assert convert(source, tmp_path / "expected").exit_code == 0
    return tree(tmp_path / "expected")

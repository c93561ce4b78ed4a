"""Reports of what lies in an object store: the same figures as of the folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deepinfer_prep import convert_checkpoint
from deepinfer_prep.report.build import build_report
from tests.remote.buckets import upload
from tests.remote.s3_server import BUCKET, S3Server


def test_a_report_of_a_store_is_that_of_the_folder(server: S3Server, client: Any, source: Path, tmp_path: Path) -> None:
    remote = upload(client, source, "source")
    local, stored = build_report(source), build_report(remote)
    assert str(stored.path) == remote
    assert replace(stored, path=local.path, verdict=local.verdict) == local
    convert_checkpoint(source, tmp_path / "out")
    convert_checkpoint(source, f"s3://{BUCKET}/out")
    local, stored = build_report(tmp_path / "out"), build_report(f"s3://{BUCKET}/out")
    assert stored.refusals == ()
    assert replace(stored, path=local.path, verdict=local.verdict) == local

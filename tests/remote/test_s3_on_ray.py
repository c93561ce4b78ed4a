"""From a store to a store on a Ray cluster: nodes send the parts, and the driver has journal and publication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep import convert_checkpoint, verify_checkpoint
from deepinfer_prep.engines import open_engine
from deepinfer_prep.errors import PrepError
from deepinfer_prep.remote.s3_workspace import ROOT
from tests.engines.cluster import running_cluster
from tests.remote.buckets import objects, unfinished_uploads, upload
from tests.remote.conftest import SMALL
from tests.remote.s3_server import BUCKET, Request, S3Server

ray = pytest.importorskip("ray", reason="the extra ray is not installed")


def part(request: Request) -> tuple[str, str]:
    return request.path, "".join(request.query.get("partNumber", []))


def test_nodes_send_the_parts_and_a_run_that_broke_off_is_resumed_by_them(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes]
) -> None:
    def make_segments_small() -> None:
        from deepinfer_prep.files import segments

        segments.SEGMENT_BYTES = SMALL

    parts: list[tuple[str, str]] = []

    def fail_after_three_parts(request: Request) -> str | None:
        with server.lock:
            parts.extend([part(request)] if request.action == "UploadPart" else [])
        return "403" if request.action == "UploadPart" and len(parts) > 3 else None

    remote, out = upload(client, source, "source"), f"s3://{BUCKET}/out"
    with running_cluster() as cluster:
        ray.init(
            address=cluster.address, log_to_driver=False, runtime_env={"worker_process_setup_hook": make_segments_small}
        )
        try:
            with open_engine("ray") as engine:
                server.rule = fail_after_three_parts
                with pytest.raises(PrepError, match="needs s3:PutObject") as raised:
                    convert_checkpoint(remote, out, engine=engine)
                assert raised.value.code == "access-denied"
                server.rule = None
                earlier = set(parts[:3])
                server.requests.clear()
                convert_checkpoint(remote, out, engine=engine)
                assert not earlier & set(map(part, server.requests))
                assert objects(client, "out") == expected
                assert verify_checkpoint(out, source=remote, engine=engine).ok
        finally:
            ray.shutdown()
    assert unfinished_uploads(client) == []
    assert not [name for name in objects(client, "out") if name.startswith(ROOT)]

"""Kills, faults and second runs: nothing finished is sent twice, nothing is lost, nothing is published wrongly."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepinfer_prep import Progress, convert_checkpoint, verify_checkpoint
from deepinfer_prep.cli.main import main
from deepinfer_prep.errors import PrepError
from deepinfer_prep.remote.s3_workspace import ROOT
from tests.raises import raises_code
from tests.remote.buckets import objects, unfinished_uploads, upload
from tests.remote.conftest import SMALL
from tests.remote.s3_server import BUCKET, Request, S3Server

OUT = f"s3://{BUCKET}/out"

CONVERT = """
import sys
import deepinfer_prep.writing.segment_writer as writer
from deepinfer_prep.files import segments
segments.SEGMENT_BYTES, writer.COMMIT_BYTES = int(sys.argv[1]), int(sys.argv[2])
from deepinfer_prep.cli.main import main
main(["convert", *sys.argv[3:], "--quiet"])
"""


def command(source: str, output: str, commit_bytes: int = 1) -> list[str]:
    return [sys.executable, "-c", CONVERT, str(SMALL), str(commit_bytes), source, output]


def data_puts(server: S3Server) -> list[tuple[str, str]]:
    """Every request that carried bytes of the output: path and part."""
    return [
        (request.path, request.query.get("partNumber", [""])[0])
        for request in server.requests
        if request.action == "UploadPart" or (request.action == "Put" and f"{ROOT}files/" in request.path)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_goes_on_without_sending_a_finished_part_again(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes], seed: int
) -> None:
    remote, choice = upload(client, source, "source"), random.Random(seed)
    server.requests.clear()
    stop_after = choice.randrange(3, 75)
    process = subprocess.Popen(command(remote, OUT, commit_bytes=choice.choice([1, 4 * SMALL])), env=os.environ)
    deadline = time.monotonic() + 60
    while process.poll() is None and len(server.requests) < stop_after and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.3)  # The server ends what it was asked for.
    arrived = _arrived_parts(client)
    before = len(server.requests)
    ended = subprocess.run(command(remote, OUT), env=os.environ, stderr=subprocess.PIPE)
    assert ended.returncode == 0 or b"already holds a finished output" in ended.stderr
    assert objects(client, "out") == expected
    assert unfinished_uploads(client) == []
    again = {
        (request.path, request.query["partNumber"][0])
        for request in server.requests[before:]
        if request.action == "UploadPart"
    }
    assert not again & arrived


def _arrived_parts(client: Any) -> set[tuple[str, str]]:
    """The parts that are in the store, as paths and numbers."""
    found = set()
    for item in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        parts = client.list_parts(Bucket=BUCKET, Key=item["Key"], UploadId=item["UploadId"]).get("Parts", ())
        found |= {(f"/{BUCKET}/{item['Key']}", str(part["PartNumber"])) for part in parts}
    return found


@pytest.mark.parametrize("fault", ["500", "503", "drop request", "drop answer"])
def test_every_request_that_fails_once_is_repeated(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *arguments: 0.001)
    remote = upload(client, source, "source")
    server.fail_once_each(fault, lambda request: True)
    convert_checkpoint(remote, OUT)
    server.rule = None
    assert objects(client, "out") == expected
    assert unfinished_uploads(client) == []


@pytest.mark.parametrize("fault", ["truncate", "slow"])
def test_a_body_that_is_cut_or_slow_is_read_to_its_end(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes], fault: str
) -> None:
    remote = upload(client, source, "source")
    server.fail_once_each(fault, lambda request: request.action == "Get" and "safetensors" in request.path)
    convert_checkpoint(remote, OUT)
    server.rule = None
    assert objects(client, "out") == expected


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("403", "access-denied", "needs s3:PutObject on arn:aws:s3:::models/out/model-"),
        ("expired", "expired-credentials", "run the same command again: it resumes"),
        ("412", "source-changed", "Nothing was published"),
    ],
)
def test_a_refusal_in_the_middle_of_a_run_is_explained_and_the_run_can_go_on(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes], fault: str, code: str, words: str
) -> None:
    remote = upload(client, source, "source")
    parts: list[Request] = []

    def rule(request: Request) -> str | None:
        if request.action == "UploadPart":
            parts.append(request)
        return fault if request.action == "UploadPart" and len(parts) > 3 else None

    server.rule = rule
    with pytest.raises(PrepError) as caught:
        convert_checkpoint(remote, OUT, workers=1)
    assert caught.value.code == code
    assert words in " ".join(str(caught.value).split())
    assert not [name for name in objects(client, "out") if not name.startswith(ROOT)]
    server.rule = None
    sent = {(request.path, request.query["partNumber"][0]) for request in parts[:3]}
    server.requests.clear()
    convert_checkpoint(remote, OUT)
    assert objects(client, "out") == expected
    assert not sent & set(data_puts(server))


@pytest.mark.usefixtures("small_segments")
def test_a_source_that_changes_stops_the_run(server: S3Server, client: Any, source: Path) -> None:
    remote = upload(client, source, "source")
    changed = []

    def rule(request: Request) -> str | None:
        if request.action == "UploadPart" and not changed:
            changed.append(request)
            data = (source / "model-2.safetensors").read_bytes()
            client.put_object(Bucket=BUCKET, Key="source/model-2.safetensors", Body=data[:-1] + b"\x02")
        return None

    server.rule = rule
    with pytest.raises(PrepError) as caught:
        convert_checkpoint(remote, OUT, workers=1)
    assert caught.value.code == "source-changed"
    assert "model-2.safetensors changed" in str(caught.value)
    assert not [name for name in objects(client, "out") if not name.startswith(ROOT)]


@pytest.mark.parametrize("action", ["CompleteUpload", "Copy", "Put manifest"])
def test_a_publication_that_fails_goes_on(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes], action: str
) -> None:
    seen: list[str] = []

    def rule(request: Request) -> str | None:
        is_manifest = action == "Put manifest" and request.path.endswith("out/neuron_manifest.json")
        if request.action == action or (is_manifest and request.method == "PUT"):
            seen.append(request.path)
            return "403" if len(seen) > 1 or is_manifest else None
        return None

    server.rule = rule
    with pytest.raises(PrepError):
        convert_checkpoint(source, OUT)
    assert "neuron_manifest.json" not in objects(client, "out")
    server.rule = None
    server.requests.clear()
    result = convert_checkpoint(source, OUT)
    assert result.resumed_bytes == result.output_bytes - _sidecar_bytes(expected)
    assert objects(client, "out") == expected
    assert data_puts(server) == []


def _sidecar_bytes(files: dict[str, bytes]) -> int:
    return sum(len(data) for name, data in files.items() if name.startswith("neuron/"))


def test_two_equal_runs_side_by_side_leave_one_correct_output(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes]
) -> None:
    remote = upload(client, source, "source")
    runs = [subprocess.Popen(command(remote, OUT), env=os.environ, stderr=subprocess.PIPE) for _ in range(2)]
    ends = [(run.communicate()[1].decode(), run.returncode) for run in runs]
    assert any(code == 0 for _, code in ends), ends
    assert all(code == 0 or "Run the command again" in text or "already holds" in text for text, code in ends), ends
    found = {name: data for name, data in objects(client, "out").items() if not name.startswith(ROOT)}
    assert found == expected


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("is_finished", [False, True], ids=["still writing", "published and gone"])
def test_a_run_whose_prefix_was_taken_over_removes_nothing(client: Any, source: Path, is_finished: bool) -> None:
    theirs = {"neuron_manifest.json": b"{}", "model.safetensors.index.json": b"{}"}

    def take_over(progress: Progress) -> None:
        if progress.stage == "convert" and progress.done == progress.total:
            for name, data in theirs.items():
                client.put_object(Bucket=BUCKET, Key=f"out/{name}", Body=data)
            run = f"out/{ROOT}run.json"
            if is_finished:
                client.delete_object(Bucket=BUCKET, Key=run)
            else:
                client.put_object(Bucket=BUCKET, Key=run, Body=b'{"format": 1, "id": "theirs", "identity": {}}')

    with raises_code("taken-over"):
        convert_checkpoint(source, OUT, progress=take_over)
    found = objects(client, "out")
    assert {name: found[name] for name in found if not name.startswith(ROOT)} == theirs


@pytest.mark.usefixtures("small_segments")
def test_a_different_run_is_refused_while_one_is_unfinished_and_discard_ends_it(
    server: S3Server, client: Any, source: Path
) -> None:
    server.rule = lambda request: "403" if request.query.get("partNumber") == ["2"] else None
    with pytest.raises(PrepError):
        convert_checkpoint(source, OUT)
    server.rule = None
    other = CliRunner().invoke(main, ["convert", str(source), OUT, "--quiet", "--activation-scales", "keep"])
    assert other.exit_code == 1
    assert "its options differ from this run's" in other.stderr
    assert unfinished_uploads(client) != []
    ended = CliRunner().invoke(main, ["discard", OUT])
    assert (ended.exit_code, ended.stdout) == (0, f"{OUT}: the unfinished conversion was removed\n")
    assert unfinished_uploads(client) == []
    assert objects(client, "out") == {}
    again = CliRunner().invoke(main, ["discard", OUT])
    assert (again.exit_code, again.stdout) == (0, f"{OUT}: no unfinished conversion is there\n")


@pytest.mark.usefixtures("small_segments")
def test_a_store_without_conditional_writes_is_told(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes]
) -> None:
    server.ignores_conditions = True
    try:
        result = convert_checkpoint(source, OUT)
    finally:
        server.ignores_conditions = False
    assert any("does not know conditional writes" in warning for warning in result.warnings)
    assert objects(client, "out") == expected


@pytest.mark.usefixtures("small_segments")
def test_a_store_that_knows_no_crc_gets_md5(server: S3Server, client: Any, source: Path) -> None:
    server.knows_crc = False
    server.requests.clear()
    try:
        convert_checkpoint(source, OUT)
    finally:
        server.knows_crc = True
    parts = [request for request in server.requests if request.action == "UploadPart"]
    assert parts
    assert all(request.headers["md5"] and not request.headers["crc64"] for request in parts)
    assert verify_checkpoint(OUT, source=source).ok


@pytest.mark.usefixtures("small_segments")
def test_an_upload_that_was_aborted_by_somebody_is_begun_anew(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes]
) -> None:
    server.rule = lambda request: "403" if request.action == "CompleteUpload" else None
    with pytest.raises(PrepError):
        convert_checkpoint(source, OUT)
    server.rule = None
    for item in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]:
        client.abort_multipart_upload(Bucket=BUCKET, Key=item["Key"], UploadId=item["UploadId"])
    convert_checkpoint(source, OUT)
    assert objects(client, "out") == expected


@pytest.mark.usefixtures("small_segments")
def test_an_upload_whose_id_was_never_written_down_is_aborted_by_the_run_that_resumes(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes]
) -> None:
    """A process that is cut off between the answer of CreateMultipartUpload and the object that keeps the id."""
    server.rule = lambda request: "403" if f"{ROOT}uploads/" in request.path and request.method == "PUT" else None
    with pytest.raises(PrepError):
        convert_checkpoint(source, OUT, workers=1)
    server.rule = None
    orphans = unfinished_uploads(client)
    assert orphans
    server.requests.clear()
    convert_checkpoint(source, OUT)
    assert server.actions()["ListUploads"] == 1
    assert objects(client, "out") == expected
    assert unfinished_uploads(client) == []

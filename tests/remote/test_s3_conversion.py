"""Checkpoints in an object store, converted and verified: the same bytes as on one machine, and few requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from deepinfer_prep import Options, convert_checkpoint, inspect_checkpoint, verify_checkpoint
from deepinfer_prep.cli.main import main
from deepinfer_prep.files import segments
from deepinfer_prep.remote import s3_writer
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.slices import Slice
from tests.banded import weights, write_checkpoint
from tests.remote.buckets import objects, unfinished_uploads, upload
from tests.remote.s3_server import BUCKET, S3Server
from tests.small_files import tree

KERNEL = Options(layout="kernel")
OUT = f"s3://{BUCKET}/out"


@pytest.mark.usefixtures("small_segments")
def test_every_combination_of_places_gives_the_same_bytes(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    remote = upload(client, source, "source")
    convert_checkpoint(source, OUT)
    assert objects(client, "out") == expected
    convert_checkpoint(remote, f"s3://{BUCKET}/second")
    assert objects(client, "second") == expected
    convert_checkpoint(remote, tmp_path / "local")
    assert tree(tmp_path / "local") == expected
    assert unfinished_uploads(client) == []
    for output in (OUT, f"s3://{BUCKET}/second", tmp_path / "local"):
        for origin in (source, remote):
            result = verify_checkpoint(output, source=origin)
            assert result.ok, result.first


def test_the_whole_sample_goes_through_a_store(server: S3Server, client: Any, sample: Path, tmp_path: Path) -> None:
    remote = upload(client, sample, "sample")
    convert_checkpoint(sample, tmp_path / "expected")
    convert_checkpoint(remote, OUT)
    assert objects(client, "out") == tree(tmp_path / "expected")


def test_inspecting_takes_at_most_three_requests_a_shard(server: S3Server, client: Any, source: Path) -> None:
    remote = upload(client, source, "source")
    server.requests.clear()
    found = inspect_checkpoint(remote)
    here = inspect_checkpoint(source)
    assert (found.tensors, found.kinds, found.output_bytes) == (here.tensors, here.kinds, here.output_bytes)
    for name in ("model-1.safetensors", "model-2.safetensors"):
        assert sum(request.path.endswith(name) for request in server.requests) <= 3
    assert server.actions()["List"] == 1


@pytest.mark.usefixtures("small_segments")
def test_a_segment_is_one_part_and_a_small_file_is_sent_once(server: S3Server, client: Any, source: Path) -> None:
    convert_checkpoint(source, OUT)
    parts = [request for request in server.requests if request.action == "UploadPart"]
    sizes = {name: len(data) for name, data in objects(client, "out").items()}
    large = {name: size for name, size in sizes.items() if size > segments.SEGMENT_BYTES and "manifest" not in name}
    assert len(parts) == sum(-(-size // segments.SEGMENT_BYTES) for size in large.values())
    assert len({(request.path, request.query["partNumber"][0]) for request in parts}) == len(parts)
    assert all(request.headers["crc64"] for request in parts)
    sent = [request.path for request in server.requests if request.action == "Put" and "/files/" in request.path]
    assert sorted(sent) == sorted(set(sent))


@pytest.mark.usefixtures("small_segments")
def test_every_body_has_one_checksum_and_is_not_hashed_for_its_signature(
    server: S3Server, client: Any, source: Path
) -> None:
    convert_checkpoint(source, f"s3://{BUCKET}/out")
    sent = [request for request in server.requests if request.action in ("Put", "UploadPart")]
    assert {request.headers["sha256"] for request in sent} == {"UNSIGNED-PAYLOAD"}
    assert all(bool(request.headers["crc64"]) != bool(request.headers["md5"]) for request in sent)


@pytest.mark.usefixtures("small_segments")
def test_every_upload_is_complete_before_the_first_is_published_and_the_manifest_is_last(
    server: S3Server, source: Path
) -> None:
    convert_checkpoint(source, OUT)
    actions = [request.action for request in server.requests]
    published = [number for number, action in enumerate(actions) if action in ("CompleteUpload", "Copy")]
    assert max(number for number, action in enumerate(actions) if action == "UploadPart") < published[0]
    manifest = [n for n, request in enumerate(server.requests) if request.path == f"/{BUCKET}/out/neuron_manifest.json"]
    assert server.requests[manifest[-1]].method == "PUT"
    assert manifest[-1] > published[-1]


@pytest.mark.usefixtures("small_segments")
def test_a_file_of_very_many_segments_gets_larger_parts(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_writer, "MOST_PARTS", 2)
    convert_checkpoint(source, OUT)
    assert objects(client, "out") == expected
    numbers = [int(request.query["partNumber"][0]) for request in server.requests if request.action == "UploadPart"]
    assert max(numbers) == 2


@pytest.mark.usefixtures("small_segments")
def test_an_output_is_replaced_only_where_that_is_asked_for(
    server: S3Server, client: Any, source: Path, expected: dict[str, bytes]
) -> None:
    client.put_object(Bucket=BUCKET, Key="out/old.safetensors", Body=b"old")
    refused = CliRunner().invoke(main, ["convert", str(source), OUT, "--quiet"])
    assert refused.exit_code == 1
    assert "is not empty: it holds old.safetensors" in refused.stderr
    server.requests.clear()
    convert_checkpoint(source, OUT, overwrite=True)
    assert objects(client, "out") == expected
    again = CliRunner().invoke(main, ["convert", str(source), OUT, "--quiet"])
    assert again.exit_code == 1
    assert "already holds a finished output" in again.stderr
    removed = next(n for n, request in enumerate(server.requests) if request.path.endswith("old.safetensors"))
    assert removed > max(n for n, request in enumerate(server.requests) if request.action == "UploadPart")


def test_what_the_command_prints_names_the_places(server: S3Server, client: Any, source: Path) -> None:
    remote = upload(client, source, "source")
    result = CliRunner().invoke(main, ["convert", remote, OUT, "--quiet", "--json"])
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["source"], data["output"]) == (remote, OUT)


def test_an_output_inside_its_source_is_refused(server: S3Server, client: Any, source: Path) -> None:
    remote = upload(client, source, "source")
    for output in (remote, f"{remote}/out", f"s3://{BUCKET}"):
        result = CliRunner().invoke(main, ["convert", remote, output, "--quiet"])
        assert result.exit_code == 1
        assert "lie inside one another" in result.stderr


def test_one_file_of_a_store_is_a_checkpoint(server: S3Server, client: Any, source: Path, tmp_path: Path) -> None:
    remote = upload(client, source, "source")
    (source / "model.safetensors.index.json").unlink()
    result = CliRunner().invoke(main, ["inspect", f"{remote}/model-1.safetensors", "--json"])
    local = CliRunner().invoke(main, ["inspect", str(source / "model-1.safetensors"), "--json"])
    assert json.loads(result.stdout)["kinds"] == json.loads(local.stdout)["kinds"]


@pytest.mark.usefixtures("small_segments")
def test_weights_in_the_kernels_order_go_through_a_store(server: S3Server, client: Any, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", weights({"a": ("e4m3", (1280, 128)), "b": ("e2m1", (544, 128))}), 2)
    convert_checkpoint(source, tmp_path / "expected", options=KERNEL)
    remote = upload(client, source, "source")
    convert_checkpoint(remote, OUT, options=KERNEL)
    assert objects(client, "out") == tree(tmp_path / "expected")
    assert verify_checkpoint(OUT, source=remote).ok
    with PreparedCheckpoint(OUT) as there, PreparedCheckpoint(tmp_path / "expected") as here:
        for part in (Slice(), Slice(columns=(32, 64)), Slice(rows=(128, 544), columns=(0, 32))):
            for name in ("a.weight", "b.weight"):
                found, expected = there.read(name, part), here.read(name, part)
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        columns = Slice(columns=(64, 128))
        assert torch.equal(there.read("a.weight.nki", columns), here.read("a.weight.nki", columns))

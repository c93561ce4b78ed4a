"""Serving code loads an output from a store: the same tensors, and no more bytes than a rank needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_prep.errors import PrepError
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.requests import Request
from deepinfer_prep.runtime.loading.slices import Slice
from tests.remote.buckets import upload
from tests.remote.s3_server import BUCKET, S3Server
from tests.runtime.prepared import bf16, e8m0, f32, fp8, prepare

TENSORS = {
    "a.weight": fp8((256, 512)),
    "a.scale": e8m0((8, 16)),
    "experts.weight": fp8((512, 1024), seed=1),
    "experts.scale": e8m0((16, 32), seed=1),
    "layers.0.hc_attn_fn": f32((24, 64)),
    "norm.weight": bf16((96,)),
}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return prepare(tmp_path, TENSORS, shards=2)


def test_every_tensor_is_the_one_of_a_local_folder(server: S3Server, client: Any, output: Path) -> None:
    url = upload(client, output, "out")
    with PreparedCheckpoint(output) as here, PreparedCheckpoint(url) as there:
        assert there.tensors == here.tensors
        names = list(here.tensors)
        requests = [Request(name) for name in names]
        for one, other in zip(here.read_all(requests), there.read_all(requests), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    "part", [Slice(rows=(32, 96)), Slice(columns=(64, 128)), Slice(rows=(0, 64), columns=(32, 64))]
)
def test_parts_are_those_of_a_local_folder(server: S3Server, client: Any, output: Path, part: Slice) -> None:
    url = upload(client, output, "out")
    with PreparedCheckpoint(output) as here, PreparedCheckpoint(url) as there:
        one, other = here.read_weight("a.weight", part), there.read_weight("a.weight", part)
        assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8))
        assert torch.equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))


def test_a_rank_of_eight_receives_an_eighth_of_what_is_shared(server: S3Server, client: Any, output: Path) -> None:
    url = upload(client, output, "out")
    shared = ("a.weight", "experts.weight")
    for rank in range(8):
        with PreparedCheckpoint(url) as checkpoint:
            parts = [Request(name, checkpoint.share(name, "rows", rank, 8)) for name in shared]
            server.sent_bytes.clear()
            checkpoint.read_all(parts)
            whole = sum(checkpoint.tensor(name).nbytes for name in shared)
            assert checkpoint.bytes_read == whole // 8
            assert sum(server.sent_bytes.values()) == whole // 8


def test_a_file_that_changed_since_it_was_opened_is_an_error(server: S3Server, client: Any, output: Path) -> None:
    url = upload(client, output, "out")
    with PreparedCheckpoint(url) as checkpoint:
        name = checkpoint.tensor("a.weight").file
        data = bytearray((output / name).read_bytes())
        data[-1] ^= 1
        client.put_object(Bucket=BUCKET, Key=f"out/{name}", Body=bytes(data))
        with pytest.raises(PrepError, match="changed"):
            checkpoint.read("a.weight")

"""Opening a prepared checkpoint and reading whole tensors."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.errors import CheckpointError, ManifestError, PrepError
from deepinfer_prep.runtime.loading import tensor_file
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint, Request
from tests.runtime import prepared
from tests.runtime.prepared import same_bytes

MANIFEST = "neuron_manifest.json"


@pytest.fixture(scope="module")
def output(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "output"
    convert_checkpoint(sample, folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, in one of which a tensor of three bytes comes first, so that floats after it are not aligned."""
    tensors = {
        "odd": ("U8", (3,), b"abc"),
        "a.weight": prepared.fp8((96, 64)),
        "a.scale": prepared.e8m0((3, 2)),
        "floats": prepared.f32((5, 7)),
        "empty": ("F32", (0, 4), b""),
        "scalar": ("F32", (), b"\0\0\x80\x3f"),
        "layer.hc_attn_fn": prepared.f32((24, 32)),
        "long": ("I64", (2, 2), bytes(range(32))),
    }
    return prepared.prepare(tmp_path_factory.mktemp("small"), tensors, shards=2)


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "copy"))


@pytest.fixture(params=["mmap", "pread"])
def opened(request: pytest.FixtureRequest, small: Path) -> Iterator[PreparedCheckpoint]:
    with PreparedCheckpoint(small, access=request.param) as checkpoint:
        yield checkpoint


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_every_tensor_of_a_sample_is_what_safetensors_reads(output: Path, access: str) -> None:
    checkpoint = PreparedCheckpoint(output, access=access)  # type: ignore[arg-type]
    found = dict(zip(checkpoint.names, checkpoint.read_all([Request(name) for name in checkpoint.names]), strict=True))
    count = 0
    for shard in checkpoint.manifest.shards:
        with safe_open(output / shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                expected = file.get_tensor(name)
                assert same_bytes(found[name], expected), name
                assert checkpoint.tensor(name).dtype == expected.dtype
                assert checkpoint.tensor(name).shape == tuple(expected.shape)
                assert checkpoint.tensor(name).nbytes == expected.nbytes
                count += 1
    assert count == len(found) == len(checkpoint.names) > 100


def test_the_sidecar_is_listed_but_not_among_the_source_names(output: Path) -> None:
    checkpoint = PreparedCheckpoint(output)
    halves = {name for split in checkpoint.manifest.split.values() for name in (split.hi, split.lo)}
    assert halves
    assert halves <= set(checkpoint.tensors)
    assert not halves & set(checkpoint.names)


def test_all_dtypes_unaligned_empty_and_scalar_tensors(opened: PreparedCheckpoint, small: Path) -> None:
    expected = prepared.stored(small)
    assert set(opened.tensors) == set(expected)
    assert opened.tensor("layer.hc_attn_fn").start % 4
    for name, tensor in expected.items():
        assert same_bytes(opened.read(name), tensor), name


def test_mapped_tensors_share_the_pages_of_the_file(small: Path) -> None:
    checkpoint = PreparedCheckpoint(small)
    assert checkpoint.read("a.weight").data_ptr() == checkpoint.read("a.weight").data_ptr()
    copied = PreparedCheckpoint(small, access="pread")
    assert copied.read("a.weight").data_ptr() != copied.read("a.weight").data_ptr()


def test_writing_to_a_mapped_tensor_does_not_change_the_file(copy: Path) -> None:
    before = {path: path.read_bytes() for path in copy.glob("*.safetensors")}
    checkpoint = PreparedCheckpoint(copy)
    checkpoint.read("a.weight").view(torch.uint8).fill_(7)
    assert {path: path.read_bytes() for path in before} == before
    assert (PreparedCheckpoint(copy).read("a.weight").view(torch.uint8) != 7).any()


def test_tensors_outlive_the_checkpoint(opened: PreparedCheckpoint, small: Path) -> None:
    tensor = opened.read("a.weight")
    opened.close()
    opened.close()
    assert same_bytes(tensor, prepared.stored(small)["a.weight"])


def test_reading_into_a_buffer(opened: PreparedCheckpoint, small: Path) -> None:
    expected = prepared.stored(small)["floats"]
    buffer = torch.zeros(5, 7)
    assert opened.read("floats", out=buffer) is buffer
    assert torch.equal(buffer, expected)
    strided = torch.zeros(7, 10).t()[::2]
    opened.read("floats", out=strided)
    assert torch.equal(strided, expected)
    weight = opened.read("a.weight", out=torch.zeros(64, 96, dtype=torch.uint8).t())
    assert torch.equal(weight, prepared.stored(small)["a.weight"].view(torch.uint8))


def test_reading_into_a_parameter(opened: PreparedCheckpoint, small: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(5, 7))
    opened.read("floats", out=parameter)
    assert torch.equal(parameter.detach(), prepared.stored(small)["floats"])


@pytest.mark.parametrize(
    ("out", "found"),
    [
        (torch.zeros(7, 5), "[7, 5]"),
        (torch.zeros(5, 7, dtype=torch.float64), "float64"),
        (torch.zeros(5, 7, dtype=torch.int32), "int32"),
        (torch.zeros(5, 7, device="meta"), "meta"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(opened: PreparedCheckpoint, out: torch.Tensor, found: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened.read("floats", out=out)
    assert found in str(caught.value)
    assert "floats" in str(caught.value)


def test_an_unknown_tensor_is_named_with_the_nearest(opened: PreparedCheckpoint) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'a\.weigth'.*'a\.weight'"):
        opened.read("a.weigth")


def test_bytes_are_counted(small: Path) -> None:
    copied = PreparedCheckpoint(small, access="pread")
    copied.read("a.weight")
    assert copied.bytes_read == 96 * 64
    mapped = PreparedCheckpoint(small)
    mapped.read("a.weight")
    assert 96 * 64 <= mapped.bytes_read <= 96 * 64 + 2 * 4096
    assert mapped.bytes_read % 4096 == 0


def test_reading_in_order_of_requests_whatever_the_order_in_the_files(opened: PreparedCheckpoint, small: Path) -> None:
    expected, names = prepared.stored(small), sorted(opened.tensors, reverse=True)
    for name, tensor in zip(names, opened.read_all([Request(name) for name in names]), strict=True):
        assert same_bytes(tensor, expected[name]), name


def test_progress_adds_up_to_the_bytes_asked_for(opened: PreparedCheckpoint) -> None:
    steps: list[int] = []
    wanted = ["a.weight", "floats", "long"]
    opened.read_all([Request(name) for name in wanted], progress=steps.append)
    assert sum(steps) == sum(opened.tensor(name).nbytes for name in wanted)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="is no folder"):
        PreparedCheckpoint(tmp_path / "absent")


def test_a_source_is_no_output(sample: Path) -> None:
    with pytest.raises(ManifestError, match=r"has no neuron_manifest\.json"):
        PreparedCheckpoint(sample)


def test_an_unfinished_conversion_is_refused(copy: Path) -> None:
    (copy / MANIFEST).unlink()
    (copy / ".deepinfer-prep").mkdir()
    with pytest.raises(ManifestError, match=r"unfinished conversion.*resumes"):
        PreparedCheckpoint(copy)


def test_a_newer_format_is_refused(copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(ManifestError, match="format version 99"):
        PreparedCheckpoint(copy)


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ManifestError, match=r"model-00002-of-00002\.safetensors is missing"):
        PreparedCheckpoint(copy)


def test_a_cut_shard_is_refused(copy: Path) -> None:
    path = copy / "model-00001-of-00002.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(ManifestError, match=rf"{size - 1:,} bytes.*{size:,} bytes.*verify"):
        PreparedCheckpoint(copy)


def test_an_original_copied_over_its_converted_shard_is_refused(copy: Path) -> None:
    path = copy / "model-00001-of-00002.safetensors"
    raw = path.read_bytes()
    assert b"deepinfer_prep" in raw
    path.write_bytes(raw.replace(b"deepinfer_prep", b"a_foreign_mark"))
    with pytest.raises(ManifestError, match="mark of a converted file"):
        PreparedCheckpoint(copy)


def test_a_manifest_that_names_an_absent_tensor_is_refused(copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["weights"]["ghost.weight"] = manifest["weights"]["a.weight"]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match=r"'ghost\.weight'"):
        PreparedCheckpoint(copy)


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("read_before", [False, True])
def test_a_file_cut_while_open_is_an_error_and_no_crash(tmp_path: Path, access: str, read_before: bool) -> None:
    output = prepared.prepare(tmp_path, {"a": prepared.f32((64, 1024)), "b": prepared.f32((64, 1024))})
    checkpoint = PreparedCheckpoint(output, access=access)  # type: ignore[arg-type]
    if read_before:
        checkpoint.read("a")
    os.truncate(output / "model-00001-of-00001.safetensors", 8192)
    with pytest.raises(PrepError, match=r"model-00001-of-00001\.safetensors"):
        checkpoint.read("b")


def test_a_kernel_without_the_advice_reads_pages_by_touching_them(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldKernel:
        @staticmethod
        def madvise(address: int, length: int, advice: int) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(tensor_file, "_libc", OldKernel)
    checkpoint = PreparedCheckpoint(small)
    assert same_bytes(checkpoint.read("a.weight"), prepared.stored(small)["a.weight"])
    assert checkpoint.bytes_read % 4096 == 0


def test_a_read_that_comes_short_goes_on(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        for buffer in buffers:
            if len(buffer):
                return real(descriptor, [buffer[: max(1, len(buffer) // 3)]], offset)
        return 0

    checkpoint = PreparedCheckpoint(small, access="pread")
    monkeypatch.setattr(os, "preadv", short)
    for name, tensor in prepared.stored(small).items():
        assert same_bytes(checkpoint.read(name), tensor), name
    found = checkpoint.read_all([Request(name) for name in checkpoint.names])
    assert all(same_bytes(one, prepared.stored(small)[name]) for name, one in zip(checkpoint.names, found, strict=True))

"""What is checked when an output is opened and read: manifest against headers, digests, codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepinfer_prep.errors import CheckpointError, ManifestError
from deepinfer_prep.files import segments
from deepinfer_prep.files.digests import SegmentDigests
from deepinfer_prep.runtime.load import load_weights, weights_iterator
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint, Request
from deepinfer_prep.runtime.loading.slices import Slice
from tests.runtime import prepared
from tests.runtime.models import Holder

MANIFEST = "neuron_manifest.json"
SHARD = "model-00001-of-00001.safetensors"
TENSORS: dict[str, prepared.Tensor] = {
    "a.weight": prepared.fp8((128, 64), 1),
    "a.scale": prepared.e8m0((4, 2), 1),
    "b.weight": prepared.fp8((128, 64), 2),
    "b.weight_scale_inv": ("F32", (4, 2), torch.full((4, 2), 0.3).numpy().tobytes()),
    "e.weight": prepared.fp4((64, 32), 3),
    "e.scale": prepared.e8m0((64, 2), 3),
    "hc_attn_fn": prepared.f32((24, 256), 4),
    "bias": prepared.bf16((64,), 5),
}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_BYTES", 8192)
        return prepared.prepare(tmp_path_factory.mktemp("trust"), TENSORS)


@pytest.fixture
def copy(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 8192)
    return Path(shutil.copytree(output, tmp_path / "copy"))


def edit_manifest(folder: Path, change: Change) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def weight_record(name: str, **fields: object) -> Change:
    return lambda manifest: manifest["weights"][name].update(fields)


def set_field(part: str, value: object) -> Change:
    return lambda manifest: manifest.update({part: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            weight_record("a.weight", block=[64, 64]),
            r"'a\.weight' of shape \[128, 64\] has a scale of shape \[4, 2\], but",
        ),
        (weight_record("b.weight", block=[64, 64]), r"blocks of 64x64 would give \[2, 1\]"),
        (weight_record("b.weight", block=[16, 64]), r"would give \[8, 1\]"),
        (weight_record("a.weight", element="e2m1"), r"which is not how e2m1 is stored"),
        (weight_record("e.weight", element="e4m3"), r"which is not how e4m3 is stored"),
        (weight_record("a.weight", scale="bias"), r"has a scale of shape \[64\]"),
        (weight_record("a.weight", scale="e.weight"), r"'e\.weight' is torch\.int8, which is no dtype of a scale"),
        (
            weight_record("b.weight", kernel_scale="b.weight_scale_inv"),
            r"kernel scale of 'b\.weight' is torch\.float32",
        ),
        (weight_record("b.weight", kernel_scale="e.scale"), r"\[64, 2\] instead of e8m0 bytes \[4, 2\]"),
        (set_field("unscaled", ["bias"]), r"'bias' is torch\.bfloat16 instead of float8_e4m3fn"),
        (set_field("split", {"bias": {"hi": "bias", "lo": "bias"}}), r"'bias' is torch\.bfloat16 instead of float32"),
        (set_field("split", {"hc_attn_fn": {"hi": "bias", "lo": "bias"}}), r"instead of bfloat16 \[24, 256\]"),
    ],
)
def test_a_manifest_that_contradicts_the_headers_is_refused_at_open(copy: Path, change: Change, words: str) -> None:
    edit_manifest(copy, change)
    with pytest.raises(ManifestError, match=f"contradict one another: .*{words}"):
        PreparedCheckpoint(copy)


def byte_of(folder: Path, name: str, index: int) -> tuple[Path, int]:
    """The file and offset of a byte of a tensor."""
    with PreparedCheckpoint(folder) as opened:
        tensor = opened.tensor(name)
        return folder / tensor.file, tensor.start + index


def poke(folder: Path, name: str, index: int, value: int | None = None) -> None:
    """Flip a byte of a tensor, or set it."""
    path, offset = byte_of(folder, name, index)
    data = bytearray(path.read_bytes())
    data[offset] = data[offset] ^ 1 if value is None else value
    path.write_bytes(data)


def read_everything(checkpoint: PreparedCheckpoint, way: str) -> None:
    if way == "read_all":
        for name in checkpoint.tensors:
            checkpoint.read(name, out=torch.empty(checkpoint.tensor(name).shape, dtype=checkpoint.tensor(name).dtype))
    elif way == "iterator":
        list(weights_iterator(checkpoint))
    else:
        model = nn.Module()
        model.a = Holder(weight=torch.zeros(128, 64, dtype=torch.float8_e4m3fn, device="meta"))
        load_weights(model, checkpoint, rename=lambda name: name if name == "a.weight" else None)


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("way", ["read_all", "iterator", "load_weights"])
def test_a_flipped_byte_is_found_and_named(copy: Path, access: Any, way: str) -> None:
    for verify in ("digests", "codes"):
        read_everything(PreparedCheckpoint(copy, access=access, verify=verify), way)  # type: ignore[arg-type]
    poke(copy, "a.weight", 7000)
    read_everything(PreparedCheckpoint(copy, access=access), way)
    words = r"bytes [\d,]+ to [\d,]+ are not those that were written: their digest is .*They hold .*'a\.weight'"
    with pytest.raises(CheckpointError, match=words) as caught:
        read_everything(PreparedCheckpoint(copy, access=access, verify="digests"), way)
    assert str(copy / SHARD) in str(caught.value)
    assert caught.value.code == "bad-digest"


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("code", [0x78, 0x7E, 0xF8, 0xFE])
def test_a_code_above_240_is_found_and_named(copy: Path, access: Any, code: int) -> None:
    poke(copy, "b.weight", 5000, code)
    words = rf"tensor 'b\.weight': element 5,000 is the fp8 code 0x{code:02x}"
    with pytest.raises(CheckpointError, match=words):
        PreparedCheckpoint(copy, access=access, verify="codes").read("b.weight")


def test_a_code_above_240_is_found_though_the_digest_agrees(copy: Path) -> None:
    poke(copy, "b.weight", 5000, 0x7E)
    digests = SegmentDigests()
    digests.update(torch.frombuffer(bytearray((copy / SHARD).read_bytes()), dtype=torch.uint8).numpy())
    edit_manifest(copy, lambda manifest: manifest["files"][SHARD].update(digests=list(digests.digests())))
    PreparedCheckpoint(copy, verify="digests").read("b.weight")
    with pytest.raises(CheckpointError, match="element 5,000"):
        PreparedCheckpoint(copy, verify="codes").read("b.weight")


def test_nan_codes_that_the_source_held_are_no_error(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, {"w.weight": ("F8_E4M3", (32, 32), 0x7F), "w.scale": prepared.e8m0((1, 1))})
    PreparedCheckpoint(output, verify="codes").read("w.weight")


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_each_segment_is_checked_once_and_only_where_something_of_it_is_read(copy: Path, access: Any) -> None:
    poke(copy, "a.weight", 0)
    with PreparedCheckpoint(copy, access=access, verify="digests") as opened:
        opened.read("b.weight", Slice(rows=(100, 128)))
        size = opened.bytes_read
        opened.read("b.weight", Slice(rows=(100, 128)))
        assert opened.bytes_read - size <= 8192
        with pytest.raises(CheckpointError, match=r"'a\.weight'"):
            opened.read("a.weight", Slice(rows=(0, 1)))


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_what_was_found_wrong_once_is_found_wrong_again(copy: Path, access: Any) -> None:
    poke(copy, "a.weight", 0)
    with PreparedCheckpoint(copy, access=access, verify="digests") as opened:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"'a\.weight'"):
                opened.read("a.weight")


def test_reading_into_memory_reads_each_byte_once(copy: Path) -> None:
    with PreparedCheckpoint(copy, access="pread", verify="digests") as opened:
        opened.read_all([Request(name) for name in opened.names])
        assert opened.bytes_read == (copy / SHARD).stat().st_size


PARTS = [
    Slice(rows=(3, 125)),
    Slice(columns=(8, 40)),
    Slice(rows=(60, 70), columns=(0, 32)),
    Slice(rows=(0, 1)),
]


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_checked_parts_hold_the_bytes_of_unchecked_ones(copy: Path, access: Any) -> None:
    wanted = [(name, part) for name in ("a.weight", "b.weight") for part in PARTS]
    with PreparedCheckpoint(copy) as plain, PreparedCheckpoint(copy, access=access, verify="digests") as checked:
        requests = []
        for name, part in wanted:
            columns, rows = plain.read(name, part).T.shape
            strided = torch.empty(columns, rows, dtype=torch.float8_e4m3fn).T
            requests += [Request(name, part), Request(name, part, strided)]
        found = checked.read_all(requests)
        for request, tensor in zip(requests, found, strict=True):
            expected = plain.read(request.name, request.part)
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_a_file_that_is_cut_while_it_is_checked_is_an_error(copy: Path) -> None:
    with PreparedCheckpoint(copy, access="pread", verify="digests") as opened:
        path, offset = byte_of(copy, "bias", 0)
        with path.open("r+b") as file:
            file.truncate(offset)
        with pytest.raises(Exception, match="it was cut while it was being read"):
            opened.read("bias")


def test_an_unknown_level_is_a_mistake_of_the_caller(output: Path) -> None:
    with pytest.raises(ValueError, match="verify is 'all'; it has to be one of 'headers', 'digests', 'codes'"):
        PreparedCheckpoint(output, verify="all")  # type: ignore[arg-type]

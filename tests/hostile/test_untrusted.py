"""Manifests, indexes, configs and side files that are not what they should be: one sentence, never a traceback."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep import convert_checkpoint, inspect_checkpoint, verify_checkpoint
from deepinfer_prep.errors import CheckpointError, ManifestError, PrepError
from deepinfer_prep.files import untrusted
from deepinfer_prep.manifest import read_manifest
from tests.hostile.checkpoints import MANIFEST, write_checkpoint
from tests.raises import raises_code

INDEX = "model.safetensors.index.json"
SHARD = "model-1.safetensors"
WEIGHT = "layers.0.wq.weight"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untrusted")
    convert_checkpoint(write_checkpoint(folder / "source"), folder / "out")
    return folder


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"x": [value]}
    return value


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no digests": lambda m: m["files"][SHARD].update(digests=[]),
    "too many digests": lambda m: m["files"][SHARD]["digests"].append("0" * 32),
    "digest of another length": lambda m: m["files"][SHARD].update(digests=["0"]),
    "digest that is a number": lambda m: m["files"][SHARD].update(digests=[1]),
    "size as text": lambda m: m["files"][SHARD].update(size="1"),
    "size null": lambda m: m["files"][SHARD].update(size=None),
    "size as a list": lambda m: m["files"][SHARD].update(size=[1]),
    "negative size": lambda m: m["files"][SHARD].update(size=-1),
    "size true": lambda m: m["files"][SHARD].update(size=True),
    "enormous size": lambda m: m["files"][SHARD].update(size=2**70),
    "block of zeros": lambda m: m["weights"][WEIGHT].update(block=[0, 0]),
    "block of one": lambda m: m["weights"][WEIGHT].update(block=[128]),
    "block of letters": lambda m: m["weights"][WEIGHT].update(block="ab"),
    "unknown element": lambda m: m["weights"][WEIGHT].update(element="foo"),
    "element that is a list": lambda m: m["weights"][WEIGHT].update(element=["e4m3"]),
    "scale that is a list": lambda m: m["weights"][WEIGHT].update(scale=[]),
    "reason that is a number": lambda m: m["weights"][WEIGHT].update(reason=4),
    "split of lists": lambda m: m.update(split=[["a", "b"]]),
    "halves that are lists": lambda m: m["split"].update(x={"hi": [], "lo": []}),
    "shards that are numbers": lambda m: m.update(shards=[5]),
    "one shard twice": lambda m: m.update(shards=[SHARD, SHARD]),
    "options that are a list": lambda m: m.update(options=[]),
    "counts that are text": lambda m: m.update(counts={"rounded": "1", "nan": 0, "misread": 0}),
    "a missing field": lambda m: m.pop("family"),
    "a field more": lambda m: m.update(colour="red"),
    "deep nesting": lambda m: m.update(options=deep(200)),
    "a shard outside": lambda m: m.update(shards=["../outside/model.safetensors"]),
    "an absolute shard": lambda m: m.update(shards=["/etc/model.safetensors"]),
    "a shard in a folder": lambda m: m.update(shards=["inference/model.safetensors"]),
    "a sidecar at the top": lambda m: m.update(sidecar=["neuron-00001-of-00001.safetensors"]),
    "a sidecar outside": lambda m: m.update(sidecar=["neuron/../../x.safetensors"]),
    "a file outside": lambda m: m["files"].update({"../../victim/precious": {"size": 0, "digests": ["0" * 32]}}),
    "an absolute file": lambda m: m["files"].update({"/etc/passwd": {"size": 0, "digests": ["0" * 32]}}),
    "the manifest itself": lambda m: m["files"].update({MANIFEST: {"size": 0, "digests": ["0" * 32]}}),
    "a name of 5,000 characters": lambda m: m["files"].update({"x" * 5000: {"size": 0, "digests": ["0" * 32]}}),
    "a name with a zero": lambda m: m["files"].update({"a\0b": {"size": 0, "digests": ["0" * 32]}}),
    "another version": lambda m: m.update(format_version="2"),
    "a version that is true": lambda m: m.update(format_version=True),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_manifest_with_a_field_of_another_kind_is_damaged(prepared: Path, tmp_path: Path, kind: str) -> None:
    data = json.loads((prepared / "out" / MANIFEST).read_text())
    DAMAGE[kind](data)
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(ManifestError) as caught:
        verify_checkpoint(tmp_path)
    assert str(tmp_path / MANIFEST) in str(caught.value)
    assert len(str(caught.value)) < 600


TEXTS: dict[str, bytes] = {
    "a key twice": b'{"weight_map": {"a": "x.safetensors"}, "weight_map": {}}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "not UTF-8": b'{"a": "\xff"}',
    "a list": b"[]",
    "nothing": b"",
    "zeros": bytes(100),
    "half a surrogate": b'{"weight_map": {"a": "\\ud800.safetensors"}}',
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", [INDEX, "config.json", MANIFEST])
def test_text_that_is_no_json_object_is_one_sentence(tmp_path: Path, name: str, kind: str) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / name).write_bytes(TEXTS[kind])
    with pytest.raises(PrepError) as caught:
        verify_checkpoint(source) if name == MANIFEST else inspect_checkpoint(source)
    assert "\n" not in str(caught.value)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)
        server.bind(path.name)


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [make_fifo, make_socket, make_device_link, make_folder])
@pytest.mark.parametrize("name", ["config.json", MANIFEST, "hf_quant_config.json"])
@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_not_read(
    tmp_path: Path, name: str, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_checkpoint(tmp_path / "source")
    (source / name).unlink(missing_ok=True)
    make(source / name)
    if name == "hf_quant_config.json":
        inspect_checkpoint(source)  # Left out with a warning, or refused as a link; never read.
        return
    with pytest.raises((CheckpointError, ManifestError)) as caught:
        verify_checkpoint(source) if name == MANIFEST else inspect_checkpoint(source)
    assert str(source / name) in str(caught.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """A sparse file: reading it would take all of memory."""
    source = write_checkpoint(tmp_path / "source")
    with (source / "config.json").open("r+b") as file:
        file.truncate(2**40)
    with raises_code("bad-json"):
        inspect_checkpoint(source)


@pytest.mark.parametrize("text", [b"{}," * 30_000_000, b'[[],[],"' + b"x" * 10 + b'",' + b"1," * 60_000_000])
def test_text_that_would_take_gigabytes_is_not_parsed(text: bytes) -> None:
    with pytest.raises(untrusted.JsonError, match="values"):
        untrusted.parse_object(text, untrusted.INDEX)


def test_a_manifest_that_is_written_is_read(prepared: Path) -> None:
    manifest = read_manifest(prepared / "out")
    assert manifest.to_json() == (prepared / "out" / MANIFEST).read_bytes()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../b", "/a", "a//b", "a/", "a\\b", "a\0b", "x" * 256, "/".join(["abc"] * 2000)]
)
def test_names_that_lead_out_or_nowhere_are_refused(name: str) -> None:
    assert untrusted.name_problem(name)


@pytest.mark.parametrize("name", ["a", "a/b", ".hidden", "...", "a..b", "\u00e9/\u4e2d", "x" * 255])
def test_names_of_files_are_fine(name: str) -> None:
    assert not untrusted.name_problem(name)

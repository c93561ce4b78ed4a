"""Checkpoints of more shards than the process may open files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from deepinfer_prep import PrepError, convert_checkpoint
from deepinfer_prep.files.storage import RangeReader
from deepinfer_prep.runtime import PreparedCheckpoint
from deepinfer_prep.runtime.loading.open_files import OpenFiles
from tests.small_files import SCALE, WEIGHT, write_file


def no_check(reader: RangeReader) -> None:
    """Takes every file."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / str(number) for number in range(12)]
    for path in found:
        path.write_bytes(path.name.encode() * 8)
    return found


def test_few_files_are_open_and_those_used_last_stay_so(paths: list[Path]) -> None:
    files, before, content = OpenFiles(most=3), descriptors(), bytearray(2)
    for path in paths:
        with files.use(path, no_check) as reader:
            reader.read_into(memoryview(content), 0)
        assert content == (path.name.encode() * 8)[:2]
    assert descriptors() == before + 3
    with files.use(paths[-1], no_check) as first, files.use(paths[-1], no_check) as second:
        assert first is second
    for path in paths:
        files.drop(path)
    assert descriptors() == before


def test_files_in_use_are_not_closed(paths: list[Path]) -> None:
    files, before, content = OpenFiles(most=2), descriptors(), bytearray(1)
    with files.use(paths[0], no_check) as held:
        for path in paths[1:]:
            with files.use(path, no_check):
                pass
        files.drop(paths[0])
        held.read_into(memoryview(content), 0)
    assert content == b"0"
    for path in paths:
        files.drop(path)
    assert descriptors() == before


def test_a_file_that_fails_its_check_is_closed(paths: list[Path]) -> None:
    def refuse(reader: RangeReader) -> None:
        raise PrepError("another file")

    files, before = OpenFiles(), descriptors()
    with pytest.raises(PrepError, match="another file"), files.use(paths[0], refuse):
        pass
    assert descriptors() == before


def test_many_threads_share_few_files(paths: list[Path]) -> None:
    files, before, wrong = OpenFiles(most=2), descriptors(), []

    def read(start: int) -> None:
        content = bytearray(2)
        for number in range(200):
            path = paths[(start + number * 5) % len(paths)]
            with files.use(path, no_check) as reader:
                reader.read_into(memoryview(content), 0)
            if content != (path.name.encode() * 8)[:2]:
                wrong.append(path)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for path in paths:
        files.drop(path)
    assert descriptors() == before


LOAD = """
import resource, sys
from deepinfer_prep.runtime import PreparedCheckpoint
from deepinfer_prep.runtime.loading.requests import Request

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for access in ("mmap", "pread"):
    for verify in ("headers", "digests"):
        with PreparedCheckpoint(sys.argv[1], access=access, verify=verify) as checkpoint:
            tensors = checkpoint.read_all([Request(name) for name in checkpoint.names])
        print(len(tensors))
"""


def test_a_checkpoint_of_more_shards_than_descriptors_is_read(tmp_path: Path) -> None:
    for number in range(150):
        name = f"model-{number + 1:05}-of-00150.safetensors"
        write_file(tmp_path / "source" / name, {f"l{number}.weight": WEIGHT, f"l{number}.scale": SCALE})
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["300"] * 4


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_shard_that_was_replaced_after_it_was_opened_is_refused(tmp_path: Path, access: str) -> None:
    write_file(tmp_path / "source" / "model.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    shard = tmp_path / "out" / "model.safetensors"
    with PreparedCheckpoint(tmp_path / "out", access=access) as checkpoint:  # type: ignore[arg-type]
        other = tmp_path / "other"
        other.write_bytes(shard.read_bytes())
        other.replace(shard)
        with pytest.raises(PrepError, match="it was replaced or written to"):
            checkpoint.read("l.weight")


def test_mapped_tensors_outlive_the_checkpoint_and_are_unmapped_with_the_last_of_them(tmp_path: Path) -> None:
    write_file(tmp_path / "source" / "model.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    shard = str(tmp_path / "out" / "model.safetensors")

    def is_mapped() -> bool:
        return shard in Path("/proc/self/maps").read_text()

    with PreparedCheckpoint(tmp_path / "out") as checkpoint:
        tensor = checkpoint.read("l.weight")
    del checkpoint
    expected = tensor.view(torch.uint8).clone()
    assert is_mapped()
    part = tensor.view(torch.uint8)[:1]
    del tensor
    assert is_mapped()
    assert torch.equal(part, expected[:1])
    del part
    assert not is_mapped()


def test_the_limit_leaves_most_descriptors_to_the_process() -> None:
    assert 1 <= OpenFiles()._most <= max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)

"""Conversions and verifications on a Ray cluster: the same bytes as on one machine, whatever becomes of the nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep import Progress, RefusedError, convert_checkpoint, verify_checkpoint
from deepinfer_prep.engines import open_engine
from deepinfer_prep.errors import PrepError
from deepinfer_prep.files import segments
from tests.engines.cluster import NODE
from tests.hostile.checkpoints import WORKSPACE, convert, write_checkpoint
from tests.small_files import tree, write_config, write_file

pytest.importorskip("ray", reason="the extra ray is not installed")

from deepinfer_prep.engines import ray_engine

SEGMENT = 16 * 1024
CONVERT = f"""
from deepinfer_prep.files import segments
segments.SEGMENT_BYTES = {SEGMENT}
from deepinfer_prep.cli.main import main
main()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A shard of some hundred small segments."""
    rows = 8192
    folder = tmp_path / "source"
    tensors = {"a.weight": ("F8_E4M3", (rows, 1024), 0x7E), "a.scale": ("F8_E8M0", (rows // 32, 32), 120)}
    write_file(folder / "model.safetensors", tensors, {"format": "pt"})  # type: ignore[arg-type]
    write_config(folder, quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0")
    return folder


@pytest.fixture
def expected(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What threads write, with small segments as in the tests that use it."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", SEGMENT)
    convert_checkpoint(source, tmp_path / "expected")
    return tree(tmp_path / "expected")


def test_an_output_is_that_of_threads_and_is_verified(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_checkpoint(tmp_path / "source"), tmp_path / "out"
    convert(source, tmp_path / "expected")
    monkeypatch.chdir(tmp_path)
    assert convert(Path("source"), Path("out"), "--engine", "ray").exit_code == 0
    assert tree(output) == tree(tmp_path / "expected")
    with open_engine("ray", address) as engine:
        assert verify_checkpoint("out", source="source", engine=engine).ok
        data = bytearray((output / "model-1.safetensors").read_bytes())
        data[-3] ^= 1
        (output / "model-1.safetensors").write_bytes(data)
        damaged = verify_checkpoint("out", source="source", engine=engine)
    threaded = verify_checkpoint(output, source=source)
    assert not damaged.ok
    assert damaged.first == threaded.first


def test_a_node_that_dies_in_the_middle_of_a_run_changes_nothing(
    cluster: Any,
    address: str,
    source: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    node = cluster.add_node(**NODE)
    died_at: list[float] = []

    def kill(progress: Progress) -> None:
        if progress.stage == "convert" and progress.done and not died_at:
            died_at.append(progress.done / progress.total)
            cluster.remove_node(node, allow_graceful=False)

    with open_engine("ray", address) as engine:
        convert_checkpoint(source, tmp_path / "out", engine=engine, progress=kill)
        time.sleep(1)  # Until Ray has noticed the loss.
    assert capfd.readouterr().out == ""
    assert died_at[0] < 0.5
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_is_stopped_is_resumed(
    address: str, source: Path, expected: dict[str, bytes], tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-c", CONVERT, "convert", str(source), str(output), "--engine", "ray"]
    process = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True)
    journal = output / WORKSPACE / "journal"
    wait_until(lambda: journal.exists() and len(journal.read_bytes().splitlines()) > 1)
    process.send_signal(number)
    _, said = process.communicate()
    if number is signal.SIGINT:
        assert process.returncode == 130, said
        assert said.splitlines()[-1].startswith("stopped: interrupted.")
    assert not (output / "neuron_manifest.json").exists()
    with open_engine("ray", address) as engine:
        resumed = convert_checkpoint(source, output, engine=engine)
    assert resumed.resumed_bytes > 0
    assert tree(output) == expected


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Broken:
    """Work that fails in a way of its own."""

    def __init__(self, check: Exception | None = None, error: Exception | None = None) -> None:
        self._check, self._error = check, error

    def check(self) -> None:
        if self._check is not None:
            raise self._check

    def __call__(self, item: int, buffer: Any) -> int:
        if item == 5 and self._error is not None:
            raise self._error
        return item


def test_errors_arrive_as_they_were_raised_and_name_the_node(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = RefusedError("one", "two", code="same-folder")
    with open_engine("ray", address) as engine:
        assert engine is not None
        done: list[int] = []
        with pytest.raises(RefusedError) as raised:
            done.extend(engine.run(Broken(error=refused), [range(10)], 10, 64))
        assert type(raised.value) is RefusedError
        assert (raised.value.reasons, raised.value.code) == (("one", "two"), "same-folder")
        assert raised.value.reasons[1].code == "same-folder"
        with pytest.raises(PermissionError, match=r"denied on node .+: '/data/x'"):
            list(engine.run(Broken(error=PermissionError(13, "denied", "/data/x")), [range(10)], 10, 64))
        with pytest.raises(
            RefusedError, match=r"^node \S+ \(\S+, \w{8}\): gone: /data\. Every node has to see"
        ) as seen:
            list(engine.run(Broken(check=FileNotFoundError(2, "gone", "/data")), [range(10)], 10, 64))
        assert len(seen.value.reasons) == 2
        assert seen.value.code == "node-sees-no-files"
        monkeypatch.setattr(ray_engine, "__version__", "0.0.1")
        with pytest.raises(RefusedError, match=r"^node \S+ .* and the command is 0\.0\.1\. Install the same") as seen:
            list(engine.run(Broken(), [range(10)], 10, 64))
        assert seen.value.code == "other-version"


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    for address, words in (("127.0.0.1:1", "ray start --head"), ("ray://head:10001", "ray job submit")):
        with pytest.raises(PrepError, match=words), open_engine("ray", address):
            raise AssertionError

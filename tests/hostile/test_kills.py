"""A kill or a power cut at any moment: nothing unfinished passes for an output, and the same command goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep import convert_checkpoint, verify_checkpoint
from deepinfer_prep.errors import ConversionError
from tests.hostile.calls import Call, Killed, SystemCalls, watch
from tests.hostile.checkpoints import MANIFEST, WORKSPACE, convert, published, write_checkpoint
from tests.hostile.power import Disk
from tests.small_files import tree, write_file

INDEX = "model.safetensors.index.json"
STRIDE = int(os.environ.get("DEEPINFER_PREP_KILL_STRIDE", "9"))
"""Between two kills while data is written lie so many calls, and fewer in the publication; 1 tries every call."""


DEAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A generator of the dead run that is thrown away finds that even closing its file kills."""


def writing(calls: SystemCalls) -> range:
    """At which calls to kill a run that makes these calls while it writes data."""
    return range(0, publishing(calls).start, STRIDE)


def publishing(calls: SystemCalls) -> range:
    """At which calls to kill it while it publishes."""
    first = next(n for n, call in enumerate(calls.made) if f"{WORKSPACE}/manifest.json." in call.path)
    return range(first, len(calls.made), max(1, STRIDE // 4))


def run(source: Path, output: Path, overwrite: bool = False) -> None:
    convert_checkpoint(source, output, workers=1, overwrite=overwrite)


def run_until_killed(source: Path, output: Path, overwrite: bool = False) -> None:
    """How many calls a run makes depends a little on its thread: the last moments may come too late for it."""
    with suppress(Killed):
        run(source, output, overwrite)


def assert_nothing_unfinished(output: Path, expected: dict[str, bytes]) -> None:
    """What has its final name is right, and the index and the manifest come after all that they name."""
    found = published(output)
    assert found.items() <= expected.items()
    if INDEX in found:
        assert found.keys() | {MANIFEST, "neuron/neuron.safetensors.index.json"} >= expected.keys()
    assert MANIFEST not in found or found == expected


def resume(source: Path, output: Path, expected: dict[str, bytes], *options: str) -> None:
    finished = published(output) == expected and not (output / WORKSPACE).exists()
    result = convert(source, output, *options)
    if finished and not options:
        assert "already holds a finished output" in result.stderr
    else:
        assert result.exit_code == 0, result.stderr
    assert published(output) == expected
    assert not (output / WORKSPACE).exists()


@DEAD
@pytest.mark.parametrize("loses_power", [False, True], ids=["kill", "power cut"])
def test_a_kill_at_any_call(
    loses_power: bool, source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)
    run(source, scratch / "counted")
    for nth in (*writing(calls), *publishing(calls)):
        output, disk = scratch / f"out{nth}", Disk(calls)
        (disk if loses_power else calls).kill(nth)
        run_until_killed(source, output)
        if loses_power:
            disk.cut()
        calls.bury()
        assert_nothing_unfinished(output, expected)
        resume(source, output, expected)


@DEAD
@pytest.mark.parametrize("loses_power", [False, True], ids=["kill", "power cut"])
def test_a_kill_while_an_older_output_is_replaced(
    loses_power: bool, source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the older output is lost before the new one is complete; no index names a mixture of both."""
    older = write_checkpoint(scratch / "older", fill=0x30)
    write_file(older / "model-9.safetensors", {"extra": ("F8_E5M2", (4,), 1)})
    index = json.loads((older / INDEX).read_text())
    index["weight_map"]["extra"] = "model-9.safetensors"
    (older / INDEX).write_text(json.dumps(index))
    (older / "inference" / "model.py").rename(older / "README.md")

    first = scratch / "first"
    run(older, first)
    (first / "old.safetensors.index.json").write_text("{}")
    (first / "notes.txt").write_text("mine")
    before = published(first)
    kept = {name: before[name] for name in ("notes.txt", "README.md")}
    shutil.copytree(first, scratch / "counted")
    calls = watch(monkeypatch, scratch)
    run(source, scratch / "counted", overwrite=True)
    assert published(scratch / "counted") == {**kept, **expected}
    for nth in (*writing(calls), *publishing(calls)):
        output, disk = scratch / f"out{nth}", Disk(calls)
        shutil.copytree(first, output)
        (disk if loses_power else calls).kill(nth)
        run_until_killed(source, output, overwrite=True)
        if loses_power:
            disk.cut()
        calls.bury()
        found = published(output)
        if not (output / WORKSPACE / "manifest.json").exists():
            assert found in (before, {**kept, **expected})
        if MANIFEST in found:
            assert found in (before, {**kept, **expected})
        for name, indexed in ((INDEX, before), ("old.safetensors.index.json", before), (INDEX, expected)):
            if found.get(name) == indexed[name]:
                assert found.items() >= {name: indexed[name] for name in indexed if name.endswith("ors")}.items()
        resume(source, output, {**kept, **expected}, "--overwrite")


@DEAD
@pytest.mark.parametrize("damage", ["byte", "size", "gone", "manifest"])
@pytest.mark.parametrize("where", ["published", "unpublished"])
def test_files_damaged_while_a_publication_was_interrupted_are_written_again(
    damage: str,
    where: str,
    source: Path,
    expected: dict[str, bytes],
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = scratch / "out"
    calls = watch(monkeypatch, scratch)
    calls.kill(4, lambda call: call.name == "replace" and f"{WORKSPACE}/files" in call.path)
    with pytest.raises(Killed):
        run(source, output)
    calls.bury()
    files = output / WORKSPACE / "files" if where == "unpublished" else output
    path = sorted(path for path in files.glob("*") if path.is_file())[-1]
    do_damage(output / WORKSPACE / "manifest.json" if damage == "manifest" else path, damage)
    for nth in (40, 80):
        calls.kill(nth)
        run_until_killed(source, output)
        calls.bury()
    resume(source, output, expected)


def do_damage(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "size" else data)


def test_a_file_that_vanishes_in_the_last_moment_is_missed(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, calls = scratch / "out", watch(monkeypatch, scratch)

    def act(call: Call, proceed: Callable[[], Any]) -> Any:
        if call.name == "replace" and call.path.endswith("files/config.json"):
            os.unlink(output / WORKSPACE / "files" / "model-1.safetensors")
        return proceed()

    calls.action = act
    with pytest.raises(ConversionError, match=r"model-1\.safetensors vanished"):
        run(source, output)
    calls.mend()
    assert MANIFEST not in published(output)
    resume(source, output, expected)


@DEAD
def test_another_checkpoint_may_follow_a_run_that_was_killed_while_it_published(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)
    other = write_checkpoint(scratch / "other", fill=0x55)
    run(other, scratch / "counted")
    for nth in publishing(calls)[1:]:
        output = scratch / f"out{nth}"
        calls.kill(nth)
        run_until_killed(other, output)
        calls.bury()
        assert convert(source, output).exit_code == 1
        resume(source, output, expected, "--overwrite")


SLOW = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import os, sys, time
from deepinfer_prep.files import segments
from deepinfer_prep.writing import segment_writer
real_write, real_replace = os.pwrite, os.replace
os.pwrite = lambda *arguments: (time.sleep(0.004), real_write(*arguments))[1]
os.replace = lambda *arguments: (time.sleep(0.02), real_replace(*arguments))[1]
segments.SEGMENT_BYTES = 65536
segment_writer.COMMIT_BYTES = 262144
from deepinfer_prep.cli import main
main(sys.argv[1:])
"""
"""The command with writes and renames slowed down, so that there is time to stop it in the middle."""


def start(source: Path, output: Path, lines: int = 0) -> subprocess.Popen[str]:
    """Start a slow conversion and wait until it has a journal, of at least so many lines."""
    journal = output / WORKSPACE / "journal"
    command = [sys.executable, "-c", SLOW, "convert", str(source), str(output), "--quiet", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") >= lines):
        time.sleep(0.005)
    return process


def test_processes_killed_at_random(sample: Path, tmp_path: Path) -> None:
    run(sample, tmp_path / "expected")
    expected, output = tree(tmp_path / "expected"), tmp_path / "out"
    pauses = random.Random(4)
    killed = 0
    for _ in range(6):
        process = start(sample, output)
        time.sleep(pauses.uniform(0, 0.5))
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        process.communicate()
        if (output / MANIFEST).exists():
            break
        assert published(output).items() <= expected.items()
    assert killed
    resume(sample, output, expected)
    assert verify_checkpoint(output, source=sample).ok


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_told_and_leaves_a_run_to_resume(number: int, sample: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start(sample, output, lines=2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert errors == (
        "stopped: interrupted. No incomplete output was published. Run the same command again to resume.\n"
    )
    assert published(output) == {}
    assert len((output / WORKSPACE / "journal").read_text().splitlines()) > 1
    assert convert(sample, output).exit_code == 0
    run(sample, tmp_path / "expected")
    assert published(output) == tree(tmp_path / "expected")

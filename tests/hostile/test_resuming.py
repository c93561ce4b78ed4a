"""What a run leaves for the next one, and what that one takes over."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep import Progress, convert_checkpoint
from deepinfer_prep.files.folders import Folder
from deepinfer_prep.writing import segment_writer
from deepinfer_prep.writing.journal import Journal, read_done
from tests.hostile.calls import Call, SystemCalls, watch
from tests.hostile.checkpoints import WORKSPACE, convert, published
from tests.hostile.conftest import SMALL
from tests.small_files import tree


def open_files() -> set[str]:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)}


def stop_at_publication(calls: SystemCalls, source: Path, output: Path) -> None:
    """A run that has written everything and fails where it begins to publish."""
    calls.fail(lambda call: call.name == "replace" and "manifest.json" in str(call.arguments[1]), 0, errno.EIO)
    assert convert(source, output).exit_code == 1
    calls.mend()


def test_a_segment_that_cannot_be_read_back_is_not_taken_for_a_good_one(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, output = watch(monkeypatch, scratch), scratch / "out"
    stop_at_publication(calls, source, output)
    shard = output / WORKSPACE / "files" / "model-1.safetensors"
    with shard.open("r+b") as file:
        file.seek(SMALL + 5)
        file.write(b"\x00\x01\x02\x03")
    failed = []

    def act(call: Call, proceed: Callable[[], Any]) -> Any:
        is_damaged = call.path.endswith("files/model-1.safetensors") and call.name == "preadv"
        if is_damaged and call.arguments[2] == SMALL and not failed:
            failed.append(call)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return proceed()

    calls.action = act
    assert convert(source, output).exit_code == 0
    assert failed
    assert tree(output) == expected


def test_after_so_many_new_bytes_what_is_written_is_recorded(
    source: Path, small_segments: None, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_writer, "COMMIT_BYTES", 2 * SMALL)
    sizes: list[int] = []
    record = Journal.record

    def counted(self: Journal, segments: Any) -> None:
        listed = list(segments)
        sizes.append(len(listed))
        record(self, listed)

    monkeypatch.setattr(Journal, "record", counted)
    assert convert(source, scratch / "out").exit_code == 0
    assert len(sizes) > 1


def test_a_workspace_that_another_run_removes_meanwhile_is_made_again(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, removed = watch(monkeypatch, scratch), []

    def act(call: Call, proceed: Callable[[], Any]) -> Any:
        if call.name == "open" and call.path.endswith(f"{WORKSPACE}/lock") and not removed:
            removed.append(call)
            os.rmdir(scratch / "out" / WORKSPACE)
        return proceed()

    calls.action = act
    assert convert(source, scratch / "out").exit_code == 0
    assert removed
    assert tree(scratch / "out") == expected


def test_an_interrupted_publication_goes_on_with_the_files_that_are_there(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, output = watch(monkeypatch, scratch), scratch / "out"
    calls.fail(lambda call: call.name == "replace" and str(call.arguments[0]).endswith("model-2.safetensors"), 0, 5)
    assert convert(source, output).exit_code == 1
    calls.mend()
    shards = {"model-1.safetensors", "model-2.safetensors"}
    before = {path.stat().st_ino for path in output.rglob("model-*.safetensors")}
    assert len(before) == len(shards)
    calls.made.clear()
    events: list[Progress] = []
    result = convert_checkpoint(source, output, workers=1, progress=events.append)
    written = [call for call in calls.made if call.name == "pwrite" and Path(call.path).name in shards]
    assert written == []
    assert {(output / name).stat().st_ino for name in shards} == before
    assert result.resumed_bytes == sum(len(expected[name]) for name in published(output) if "neuron" not in name)
    assert [event.stage for event in events if event.done == event.total][-1] == "check"
    assert tree(output) == expected


@pytest.mark.parametrize("failing", ["pwrite", "preadv", "fdatasync"])
def test_a_failed_run_leaves_no_file_open(
    failing: str, source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, before = watch(monkeypatch, scratch), open_files()
    calls.fail(lambda call: call.name == failing and WORKSPACE in call.path + str(call.path), 2, errno.EIO)
    convert(source, scratch / "out")
    assert open_files() == before


def test_a_journal_that_cannot_be_begun_leaves_no_file_open(
    source: Path, small_segments: None, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, before = watch(monkeypatch, scratch), open_files()
    calls.fail(lambda call: call.name == "pwrite" and call.path.endswith("journal"), 0, errno.EIO)
    assert convert(source, scratch / "out").exit_code == 1
    assert open_files() == before


def test_the_journals_name_is_durable_before_anything_is_recorded_in_it(
    source: Path, small_segments: None, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)
    assert convert(source, scratch / "out").exit_code == 0
    made = [(call.name, call.path) for call in calls.made]
    journal = f"out/{WORKSPACE}/journal"
    writes = [number for number, call in enumerate(made) if call == ("pwrite", journal)]
    folder = made.index(("fsync", f"out/{WORKSPACE}"))
    assert writes[0] < folder < writes[1]


def test_what_a_stopped_run_recorded_is_found(
    source: Path, small_segments: None, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)
    stop_at_publication(calls, source, scratch / "out")
    done = read_done(Folder.open(scratch / "out" / WORKSPACE))
    assert {name for name, _ in done} >= {"model-1.safetensors", "model-2.safetensors"}

"""Two runs on one output: one works, the other is told so, whatever the moment at which they meet."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_prep import Progress, convert_checkpoint, verify_checkpoint
from deepinfer_prep.convert import discard_unfinished
from deepinfer_prep.files.folders import Folder
from deepinfer_prep.naming import DISCARDED_NAME
from deepinfer_prep.writing import local_target as module
from deepinfer_prep.writing.workspace import Workspace
from tests.hostile.checkpoints import MANIFEST, WORKSPACE, convert, published
from tests.raises import raises_code
from tests.small_files import tree


def test_a_second_run_is_refused_while_the_first_one_works(source: Path, scratch: Path) -> None:
    refusals = []

    def meanwhile(progress: Progress) -> None:
        if progress.stage == "convert" and 0 < progress.done < progress.total:
            for options in ((), ("--overwrite",)):
                refusals.append(convert(source, scratch / "out", *options))

    convert_checkpoint(source, scratch / "out", workers=1, progress=meanwhile)
    assert len(refusals) > 2
    for refusal in refusals:
        assert refusal.exit_code == 1
        assert "another conversion is writing to this folder" in refusal.stderr
    assert verify_checkpoint(scratch / "out", source=source).ok
    assert WORKSPACE not in os.listdir(scratch / "out")


def test_a_run_that_waited_at_the_lock_of_a_finished_one_does_not_keep_a_lost_lock(
    source: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run removes the workspace between our opening of the lock file and our locking it."""
    output, real = scratch / "out", fcntl.flock
    removed = []

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(descriptor)
            shutil.rmtree(output / WORKSPACE)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Workspace(output) as workspace:
        lock = os.open(workspace.root.path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            real(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
    assert os.listdir(output) == []


def test_an_unfinished_run_is_discarded_and_one_that_is_under_way_is_not(source: Path, scratch: Path) -> None:
    output = scratch / "out"
    with Workspace(output), raises_code("locked"):
        discard_unfinished(output)
    assert not discard_unfinished(output)
    assert convert(source, output).exit_code == 0
    finished = published(output)
    (output / WORKSPACE).mkdir(mode=0o700)
    assert discard_unfinished(output)
    assert sorted(os.listdir(output)) == sorted({name.partition("/")[0] for name in finished})
    assert published(output) == finished


def test_a_workspace_that_others_keep_removing_is_given_up(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: shutil.rmtree(scratch / "out" / WORKSPACE))
    with raises_code("locked"):
        Workspace(scratch / "out")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(
    code: int, source: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    result = convert(source, scratch / "out")
    assert result.exit_code == 1
    assert "cannot lock files" in result.stderr
    assert published(scratch / "out") == {}


def test_a_run_that_finds_the_work_done_leaves_nothing_behind(
    source: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run ends between our first look at the folder and our lock."""
    output = scratch / "out"
    looks = []
    real = module.check_usable

    def check_usable(*arguments: object) -> None:
        looks.append(arguments)
        if len(looks) == 1:
            real(*arguments)  # type: ignore[arg-type]
            with monkeypatch.context() as patch:
                patch.setattr(module, "check_usable", real)
                convert_checkpoint(source, output)
        else:
            real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "check_usable", check_usable)
    with raises_code("finished-output"):
        convert_checkpoint(source, output)
    assert sorted(name for name in os.listdir(output) if name.startswith(".")) == []
    assert verify_checkpoint(output, source=source).ok


def test_processes_that_start_together(source: Path, scratch: Path) -> None:
    convert_checkpoint(source, scratch / "expected")
    for attempt in range(2):
        output = scratch / f"out{attempt}"
        command = [sys.executable, "-m", "deepinfer_prep", "convert", str(source), str(output), "--quiet"]
        processes = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(4)
        ]
        ends = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]
        assert [status for _, status in ends].count(0) == 1, ends
        for errors, status in ends:
            assert status == 0 or "another conversion is writing" in errors or "already holds a finished" in errors
        assert tree(output) == tree(scratch / "expected")


def test_a_run_that_has_published_leaves_the_next_ones_workspace_alone(scratch: Path) -> None:
    output = scratch / "out"
    with Workspace(output) as first:
        first.discard()
        second = Workspace(output)
    with second:
        assert (output / WORKSPACE / "lock").exists()
        second.discard()
    assert os.listdir(output) == []


def test_a_run_waits_while_another_one_removes_what_it_discarded(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, real, calls = scratch / "out", Folder.remove_tree, []

    def slow(folder: Folder, name: str) -> None:
        calls.append(name)
        if len(calls) > 2:
            real(folder, name)

    with Workspace(output) as workspace:
        (output / DISCARDED_NAME).mkdir()
        (output / DISCARDED_NAME / "left").write_text("by another run")
        monkeypatch.setattr(Folder, "remove_tree", slow)
        workspace.discard()
    assert os.listdir(output) == []
    assert calls.count(DISCARDED_NAME) > 3


def test_a_killed_run_does_not_keep_its_lock(source: Path, scratch: Path) -> None:
    code = "import sys, os; from pathlib import Path; from deepinfer_prep.writing.workspace import Workspace\n"
    code += "Workspace(Path(sys.argv[1])).root.path.joinpath('journal').write_text('torn'); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(scratch / "out")], check=False).returncode == -9
    assert (scratch / "out" / WORKSPACE / "lock").exists()
    assert convert(source, scratch / "out").exit_code == 0
    assert MANIFEST in os.listdir(scratch / "out")

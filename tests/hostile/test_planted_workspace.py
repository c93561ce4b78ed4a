"""An output folder that someone else prepared: nothing is written, read or published through what they put there."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from deepinfer_prep.writing.workspace import Workspace
from tests.hostile.calls import watch
from tests.hostile.checkpoints import MANIFEST, WORKSPACE, convert, published, write_checkpoint
from tests.small_files import tree

OTHER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are made by root")


@pytest.fixture
def victim(scratch: Path) -> Iterator[Path]:
    """A folder that a conversion has no business in; afterwards it is as it was."""
    folder = scratch / "victim"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    (folder / "folder").mkdir()
    yield folder
    assert tree(folder) == {"precious": b"precious"}
    assert sorted(os.listdir(folder)) == ["folder", "precious"]


def link_to_file(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "precious")


def link_to_nothing(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "new")


def link_to_folder(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "folder")


def hard_link(path: Path, victim: Path) -> None:
    os.link(victim / "precious", path)


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


PLANTS = [link_to_file, link_to_nothing, link_to_folder, hard_link, fifo]
IN_WORKSPACE = [
    "lock",
    "journal",
    "manifest.json",
    "rejected.json",
    "manifest.json.tmp",
    "manifest.xxh3",
    "last",
    "last.tmp",
    "files",
]
IN_FILES = ["model-1.safetensors", "config.json", "inference", "inference/model.py", "neuron"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", [*IN_WORKSPACE, *(f"files/{name}" for name in IN_FILES)])
def test_what_lies_in_the_workspace_is_not_followed(
    source: Path, scratch: Path, victim: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    path = scratch / "out" / WORKSPACE / name
    path.parent.mkdir(parents=True)
    plant(path, victim)
    result = convert(source, scratch / "out", "--overwrite")
    assert result.exit_code == 1
    assert f"refused: {path} " in result.stderr
    assert published(scratch / "out") == {}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", [WORKSPACE, "inference", "neuron"])
def test_a_folder_of_the_output_that_is_something_else_is_refused(
    source: Path, scratch: Path, victim: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    (scratch / "out").mkdir()
    plant(scratch / "out" / name, victim)
    result = convert(source, scratch / "out", "--overwrite")
    assert result.exit_code == 1
    assert name in result.stderr
    assert MANIFEST not in os.listdir(scratch / "out")


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json", MANIFEST, "model.safetensors.index.json"])
def test_a_final_name_that_is_taken_is_replaced_and_not_followed(
    source: Path, scratch: Path, victim: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    (scratch / "out").mkdir()
    plant(scratch / "out" / name, victim)
    result = convert(source, scratch / "out", "--overwrite")
    assert result.exit_code == 0, result.stderr
    assert stat.S_ISREG((scratch / "out" / name).lstat().st_mode)


def stopped(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    """A run that has written everything and was stopped while it published."""
    calls = watch(monkeypatch, scratch)
    calls.fail(lambda call: call.name == "replace" and str(call.arguments[0]).endswith("model-1.safetensors"), 0, 5)
    assert convert(source, output).exit_code == 1
    calls.mend()
    assert (output / WORKSPACE / "manifest.json").exists()


def forge(ready: Path, data: dict[str, Any]) -> None:
    """Write a ready manifest with the digest that belongs to it, as somebody who knows this tool would."""
    text = json.dumps(data).encode()
    ready.write_bytes(text)
    ready.with_name("manifest.xxh3").write_text(xxhash.xxh3_128_hexdigest(text))


@pytest.mark.parametrize("victims_name", ["../../victim/precious", "../victim/new", "/etc/deepinfer-prep-test"])
def test_a_ready_manifest_that_names_other_files_is_not_believed(
    source: Path,
    expected: dict[str, bytes],
    scratch: Path,
    victim: Path,
    victims_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = scratch / "out"
    stopped(source, output, monkeypatch, scratch)
    ready = output / WORKSPACE / "manifest.json"
    data = json.loads(ready.read_text())
    data["files"][victims_name] = data["files"]["config.json"]
    forge(ready, data)
    assert convert(source, output).exit_code == 0
    assert tree(output) == expected


@pytest.mark.parametrize("change", ["one file more", "one file less", "another size"])
def test_a_ready_manifest_counts_only_where_its_files_are_the_plans(
    source: Path, expected: dict[str, bytes], scratch: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = scratch / "out"
    stopped(source, output, monkeypatch, scratch)
    ready = output / WORKSPACE / "manifest.json"
    data: dict[str, Any] = json.loads(ready.read_text())
    if change == "one file more":
        data["files"]["more.txt"] = data["files"]["config.json"]
        shutil.copy(source / "config.json", output / WORKSPACE / "files" / "more.txt")
    elif change == "one file less":
        del data["files"]["config.json"]
    else:
        shard = "model-1.safetensors"
        forged = b"forged"
        (output / WORKSPACE / "files" / shard).write_bytes(forged)
        data["files"][shard] = {"size": len(forged), "digests": [xxhash.xxh3_128_hexdigest(forged)]}
    forge(ready, data)
    assert convert(source, output).exit_code == 0
    assert tree(output) == expected


def give_away(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


@AS_ROOT
@pytest.mark.parametrize("whose", ["all", "workspace", "journal", "shard"])
def test_a_workspace_of_another_user_is_not_resumed(
    source: Path, scratch: Path, victim: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal and bytes that fit it, as the other user wants them to be published."""
    output = scratch / "out"
    stopped(source, output, monkeypatch, scratch)
    root = output / WORKSPACE
    if whose == "all":
        give_away(output)
    elif whose == "workspace":
        os.chown(root, OTHER, OTHER)
    else:
        os.chown(root / {"journal": "journal", "shard": "files/model-2.safetensors"}[whose], OTHER, OTHER)
    for options in ((), ("--overwrite",)):
        result = convert(source, output, *options)
        assert result.exit_code == 1
        assert "belongs to another user" in result.stderr
        assert MANIFEST not in os.listdir(output)


@AS_ROOT
def test_root_converts_into_a_folder_of_another_user(
    source: Path, expected: dict[str, bytes], scratch: Path, victim: Path
) -> None:
    output = scratch / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    (output / "inference").mkdir()
    give_away(output)
    assert convert(source, output, "--overwrite").exit_code == 0
    assert tree(output) == {**expected, "notes.txt": b"mine"}


def test_nobody_else_can_enter_the_workspace(scratch: Path) -> None:
    (scratch / "out" / WORKSPACE / "files").mkdir(parents=True)
    (scratch / "out" / WORKSPACE).chmod(0o777)
    (scratch / "out" / WORKSPACE / "files").chmod(0o777)
    with Workspace(scratch / "out") as workspace:
        for path in (workspace.root.path, workspace.files.path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_workspace_that_is_swapped_meanwhile_is_written_to_no_more(
    source: Path, scratch: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the output folder moves the workspace away and puts a link to the victim's folder in its place."""
    output, calls, moved = scratch / "out", watch(monkeypatch, scratch), []
    rename = os.rename

    def act(call: Any, proceed: Callable[[], Any]) -> Any:
        if call.name == "pwrite" and not moved:
            moved.append(call)
            rename(output / WORKSPACE, output / "moved")
            (output / WORKSPACE).symlink_to(victim)
        return proceed()

    calls.action = act
    convert(source, output)
    assert moved


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o4755, 0o2775])
def test_nothing_may_be_read_by_more_people_than_its_source(scratch: Path, mode: int) -> None:
    source = write_checkpoint(scratch / "source")
    for name in ("model-1.safetensors", "config.json", "inference/model.py"):
        (source / name).chmod(mode)
    before = os.umask(0)
    try:
        assert convert(source, scratch / "out").exit_code == 0
    finally:
        os.umask(before)
    for name in ("model-1.safetensors", "config.json", "inference/model.py"):
        found = stat.S_IMODE((scratch / "out" / name).stat().st_mode)
        assert found & ~0o600 == mode & 0o066
    for name in (MANIFEST, "neuron/neuron-00001-of-00001.safetensors"):
        assert stat.S_IMODE((scratch / "out" / name).stat().st_mode) & ~mode & 0o077 == 0


def test_a_closed_folder_closes_its_files(scratch: Path) -> None:
    source = write_checkpoint(scratch / "source")
    (source / "inference").chmod(0o700)
    assert convert(source, scratch / "out").exit_code == 0
    assert stat.S_IMODE((scratch / "out" / "inference" / "model.py").stat().st_mode) & 0o077 == 0

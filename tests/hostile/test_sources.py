"""Sources as people have them: caches of links, read-only, changing, unreadable, overlapping with the output."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepinfer_prep import PrepError, Progress, RefusedError, convert_checkpoint, verify_checkpoint
from deepinfer_prep.errors import ConversionError
from deepinfer_prep.writing.output_checks import check_separate
from tests.hostile.checkpoints import MANIFEST, WORKSPACE, convert, published, write_checkpoint
from tests.raises import raises_code
from tests.small_files import tree


def states(folder: Path) -> dict[str, tuple[int, ...]]:
    """What would differ if anybody had written to, replaced or touched anything in a folder."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_nlink)
    return found


def to_cache(folder: Path, cache: Path) -> Path:
    """Arrange a checkpoint as the Hugging Face cache does: a snapshot of links to read-only blobs."""
    blobs, snapshot = cache / "models--a--b" / "blobs", cache / "models--a--b" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        blob.chmod(0o444)
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_cache_snapshot_is_read_through_its_links_and_never_written(
    source: Path, scratch: Path, overwrite: bool
) -> None:
    convert_checkpoint(source, scratch / "expected")
    cache = scratch / "cache"
    snapshot = to_cache(source, cache)
    before = states(cache), tree(cache)
    output = scratch / "out"
    if overwrite:
        convert_checkpoint(source, output)
    convert_checkpoint(snapshot, output, overwrite=overwrite)
    assert (states(cache), tree(cache)) == before
    assert not any(path.is_symlink() for path in output.rglob("*"))
    assert all(path.stat().st_mode & 0o600 == 0o600 for path in output.rglob("*"))
    assert all(path.stat().st_nlink == 1 for path in output.rglob("*") if path.is_file())
    assert published(output) == tree(scratch / "expected")
    assert verify_checkpoint(output, source=snapshot).ok


def test_a_half_downloaded_cache_snapshot_is_refused(source: Path, scratch: Path) -> None:
    snapshot = to_cache(source, scratch / "cache")
    (snapshot / "model-2.safetensors").resolve().unlink()
    result = convert(snapshot, scratch / "out")
    assert result.exit_code == 1
    assert "model-2.safetensors (3 tensors); 1 of 2 shards present" in result.stderr
    (snapshot / "model-2.safetensors").unlink()
    assert "model-2.safetensors (3 tensors)" in convert(snapshot, scratch / "out").stderr
    assert not (scratch / "out").exists()


def test_the_source_folder_is_left_as_it_is(source: Path, scratch: Path) -> None:
    before = states(source)
    convert_checkpoint(source, scratch / "out")
    verify_checkpoint(scratch / "out", source=source)
    assert states(source) == before


def test_modes_of_the_output_follow_the_umask(source: Path, scratch: Path) -> None:
    before = os.umask(0o027)
    try:
        convert_checkpoint(source, scratch / "out")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (scratch / "out").rglob("*") if path.is_file()}
    assert modes == {0o640}


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:  # Never shorter meanwhile, which a reader would notice as a cut.
        file.seek(-600, os.SEEK_END)
        file.write(bytes(600))


def replace(path: Path) -> None:
    rewritten = path.with_name("new")
    shutil.copy(path, rewritten)
    rewrite(rewritten)
    rewritten.replace(path)


@pytest.mark.parametrize("change", [grow, shrink, rewrite, replace, Path.unlink], ids=lambda change: change.__name__)
def test_a_source_that_changes_while_it_is_read_stops_the_run(
    change: Callable[[Path], None], source: Path, expected: dict[str, bytes], scratch: Path
) -> None:
    """Nothing is published, and nothing read from the changed file is trusted once the first one is put back."""
    shutil.copytree(source, scratch / "original")
    changed = []

    def meanwhile(progress: Progress) -> None:
        if progress.stage == "convert" and progress.done and not changed:
            change(source / "model-2.safetensors")
            changed.append(progress.done)

    with pytest.raises((PrepError, OSError)) as caught:
        convert_checkpoint(source, scratch / "out", workers=1, progress=meanwhile)
    assert "model-2.safetensors" in str(caught.value)
    assert published(scratch / "out") == {}
    if change is not Path.unlink:
        message = convert(source, scratch / "out").stderr
        assert "cannot be resumed: its files" in message or "bytes missing" in message or "too many" in message
    shutil.copytree(scratch / "original", source, dirs_exist_ok=True, copy_function=shutil.copy2)
    result = convert_checkpoint(source, scratch / "out")
    assert result.resumed_bytes > 0
    assert published(scratch / "out") == expected


def same_times(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap_for_another(path: Path) -> None:
    """Another file of the same size and time of change: only its inode tells."""
    before, other = path.stat(), path.with_name("other")
    shutil.copy(path, other)
    rewrite(other)
    same_times(other, before)
    other.replace(path)


def rewrite_in_place(path: Path) -> None:
    """The same file with other bytes, its time of change put back: only its ctime tells."""
    before = path.stat()
    rewrite(path)
    same_times(path, before)


def link_to_another(path: Path) -> None:
    """As in a hub cache that is updated meanwhile: the name leads to another blob."""
    swap_for_another(path)
    path.rename(path.with_name("blob"))
    path.symlink_to("blob")


def touch_ctime(path: Path) -> None:
    path.chmod(path.stat().st_mode)


@pytest.mark.parametrize(
    "change", [swap_for_another, rewrite_in_place, link_to_another, touch_ctime], ids=lambda change: change.__name__
)
@pytest.mark.parametrize("late", [False, True], ids=["while it is read", "after it was read"])
def test_a_source_with_its_old_size_and_time_is_another_all_the_same(
    change: Callable[[Path], None], late: bool, source: Path, small_segments: None, scratch: Path
) -> None:
    shard = source / "model-2.safetensors"
    before, changed = shard.stat(), []

    def meanwhile(progress: Progress) -> None:
        if progress.stage == "convert" and not changed and progress.done >= (progress.total if late else 1):
            change(shard)
            changed.append(progress.done)

    with pytest.raises(ConversionError, match=r"model-2\.safetensors changed while it was being converted"):
        convert_checkpoint(source, scratch / "out", workers=1, progress=meanwhile)
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert published(scratch / "out") == {}


def test_a_file_that_changes_after_it_was_read_stops_the_run_as_well(
    source: Path, small_segments: None, scratch: Path
) -> None:
    def meanwhile(progress: Progress) -> None:
        if progress.stage == "convert" and progress.done == progress.total:
            os.utime(source / "model-1.safetensors")

    with pytest.raises(ConversionError, match=r"model-1\.safetensors changed while it was being converted"):
        convert_checkpoint(source, scratch / "out", workers=1, progress=meanwhile)
    assert published(scratch / "out") == {}


def test_a_touched_source_is_another_source_for_a_resume(source: Path, scratch: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == "convert" and progress.done == progress.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, scratch / "out", progress=stop)
    os.utime(source / "config.json")
    with pytest.raises(RefusedError, match="cannot be resumed: its files differ"):
        convert_checkpoint(source, scratch / "out")


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a second file system at /dev/shm")
def test_source_and_output_on_different_file_systems(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        output = Path(memory) / "out"
        assert source.stat().st_dev != Path(memory).stat().st_dev
        convert_checkpoint(source, output)
        assert verify_checkpoint(output, source=source).ok


def test_a_folder_of_links_into_the_output_is_refused(source: Path, scratch: Path) -> None:
    """Publication would replace what the links lead to while it is the source."""
    links = scratch / "links"
    links.mkdir()
    for path in source.glob("*.*"):
        (links / path.name).symlink_to(path)
    before = tree(source)
    with raises_code("link-into-output"):
        convert_checkpoint(links, source, overwrite=True, follow_links=True)
    assert tree(source) == before


def test_hard_links_between_source_and_output_are_not_written_through(source: Path, scratch: Path) -> None:
    output, before = scratch / "out", tree(source)
    output.mkdir()
    for name in ("model-1.safetensors", "config.json"):
        os.link(source / name, output / name)
    convert_checkpoint(source, output, overwrite=True)
    assert tree(source) == before
    assert verify_checkpoint(output, source=source).ok


def test_links_in_the_output_are_replaced_and_not_followed(source: Path, scratch: Path) -> None:
    output, target = scratch / "out", scratch / "elsewhere.safetensors"
    output.mkdir()
    target.write_bytes(b"precious")
    for name in ("model-1.safetensors", "neuron/neuron-00001-of-00001.safetensors", "stale.safetensors"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).symlink_to(target)
    convert_checkpoint(source, output, overwrite=True)
    assert target.read_bytes() == b"precious"
    assert verify_checkpoint(output, source=source).ok
    assert not any(path.is_symlink() for path in output.rglob("*"))


@pytest.mark.parametrize(
    "what", ["folder for a file", "file for a folder", "link for a folder", "link for a workspace"]
)
def test_names_of_the_output_that_are_taken_are_refused_before_writing(what: str, source: Path, scratch: Path) -> None:
    output, elsewhere = scratch / "out", scratch / "elsewhere"
    output.mkdir()
    elsewhere.mkdir()
    if what == "folder for a file":
        (output / "model-1.safetensors").mkdir()
    elif what == "file for a folder":
        (output / "inference").write_text("x")
    else:
        (output / ("inference" if "folder" in what else WORKSPACE)).symlink_to(elsewhere)
    before = states(scratch)
    with pytest.raises(
        RefusedError, match=r"cannot take the output: (model-1\.safetensors|inference|\.deepinfer-prep) is"
    ):
        convert_checkpoint(source, output, overwrite=True)
    assert states(scratch) == before


def test_a_folder_that_is_named_like_a_shard_stays(source: Path, scratch: Path) -> None:
    """It holds nothing that a loader takes for a shard of this output, and it is not ours to remove."""
    (scratch / "out" / "mine.safetensors").mkdir(parents=True)
    (scratch / "out" / "mine.safetensors" / "notes").write_text("x")
    convert_checkpoint(source, scratch / "out", overwrite=True)
    assert (scratch / "out" / "mine.safetensors" / "notes").read_text() == "x"


@pytest.mark.parametrize("what", ["file", "broken link"])
def test_an_output_that_is_no_folder_is_refused(what: str, source: Path, scratch: Path) -> None:
    if what == "file":
        (scratch / "out").write_text("x")
    else:
        (scratch / "out").symlink_to("nowhere")
    for options in ((), ("--overwrite",)):
        assert (
            "out is not a folder. Choose a folder as the output." in convert(source, scratch / "out", *options).stderr
        )


@pytest.mark.parametrize("options", [["--dry-run"], []], ids=["dry run", "run"])
def test_an_output_below_a_file_is_refused_before_writing(options: list[str], source: Path, scratch: Path) -> None:
    (scratch / "file").write_text("")
    result = convert(source, scratch / "file" / "out", *options)
    assert result.exit_code == 1
    assert f"refused: {scratch / 'file'} is not a folder" in result.stderr


READ_ONLY = """
import subprocess, sys
from deepinfer_prep.cli import main

source, disk = sys.argv[1], sys.argv[2]
subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
main(["convert", source, disk + "/out", "--dry-run", "--quiet"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
def test_a_dry_run_finds_a_read_only_output(source: Path, scratch: Path) -> None:
    """By a mount, as permissions do not bind root."""
    disk = scratch / "disk"
    disk.mkdir()
    command = ["unshare", "-m", sys.executable, "-c", READ_ONLY, str(source), str(disk)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if "permission denied" in ended.stderr.lower() or "not permitted" in ended.stderr:
        pytest.skip("mounting is not permitted here")
    assert ended.returncode == 1
    assert f"refused: {disk} cannot be written to: it is read-only" in ended.stderr


def test_one_folder_under_two_paths_is_recognised_by_its_inode(source: Path, scratch: Path) -> None:
    """As a bind mount gives it; a symbolic link is resolved before and would not need this."""

    class Elsewhere(type(Path())):  # type: ignore[misc]
        """A path that does not tell that it is `source`."""

        def resolve(self, strict: bool = False) -> Path:
            return self

    mounted = Elsewhere(scratch / "mounted")
    mounted.symlink_to(source)
    for output in (mounted, mounted / "inside"):
        with raises_code("same-folder"):
            check_separate(source, output)
    with raises_code("same-folder"):
        check_separate(mounted / "inference", source)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
def test_a_bind_mount_of_the_source_is_no_output(source: Path, scratch: Path) -> None:
    (scratch / "mounted").mkdir()
    command = "mount --bind {0}/source {0}/mounted && {1} -m deepinfer_prep convert {0}/source {0}/mounted --overwrite"
    before = tree(source)
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", command.format(scratch, sys.executable)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "permission denied" in ended.stderr.lower() or "not permitted" in ended.stderr:
        pytest.skip("mounting is not permitted here")
    assert ended.returncode == 1
    assert "same folder or lie inside one another" in ended.stderr
    assert tree(source) == before


UNPRIVILEGED = """
import os, sys
from deepinfer_prep import convert, inspect, verify
from deepinfer_prep.cli import render
from deepinfer_prep.cli import main
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
main(sys.argv[1:])
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach; pytest's are for the owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def run_unprivileged(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json", "model.safetensors.index.json", "inference"])
def test_what_may_not_be_read_is_named(name: str, public: Path) -> None:
    source = write_checkpoint(public / "source")
    (source / name).chmod(0)
    try:
        ended = run_unprivileged("convert", source, public / "out")
    finally:
        (source / name).chmod(0o700)
    assert ended.returncode == 1
    assert f"error: Permission denied [EACCES]: {source / name}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert published(public / "out") == {}


def test_a_read_only_source_and_an_output_that_may_not_be_written(public: Path) -> None:
    source = write_checkpoint(public / "source")
    for path in [*source.rglob("*"), source]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    (public / "locked").mkdir(mode=0o555)
    ended = run_unprivileged("convert", source, public / "locked" / "out")
    assert ended.returncode == 1
    assert f"refused: {public / 'locked'} cannot be written to" in ended.stderr
    ended = run_unprivileged("convert", source, public / "out", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert MANIFEST in os.listdir(public / "out")

"""Every system call of the write path fails once: a clear error, no final name, and a second run that succeeds."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep.files.storage import RangeWriter
from tests.hostile.calls import ALLOCATE, Call, watch
from tests.hostile.checkpoints import MANIFEST, convert, published
from tests.hostile.conftest import SMALL
from tests.small_files import tree

FAULTS = [
    ("open", errno.EMFILE),
    ("mkdir", errno.ENOSPC),
    ("ftruncate", errno.EFBIG),
    (ALLOCATE, errno.ENOSPC),
    ("pwrite", errno.ENOSPC),
    ("pwrite", errno.EIO),
    ("preadv", errno.EIO),
    ("fdatasync", errno.ENOSPC),
    ("fdatasync", errno.EIO),
    ("fsync", errno.EIO),
    ("replace", errno.ENOSPC),
    ("replace", errno.EIO),
    ("unlink", errno.EIO),
    ("rmdir", errno.EIO),
    ("close", errno.EDQUOT),
    ("close", errno.EIO),
]
POSITIONS = int(os.environ.get("DEEPINFER_PREP_FAULT_POSITIONS", "4"))
"""At how many of its calls each fault strikes; a large number means at every one of them."""


def spread(count: int) -> list[int]:
    """Some positions of a sequence, the first and the last among them."""
    return sorted({round(index * (count - 1) / (POSITIONS - 1)) for index in range(POSITIONS)})


@pytest.mark.parametrize(("name", "code"), FAULTS, ids=[f"{name}-{errno.errorcode[code]}" for name, code in FAULTS])
def test_a_failing_call_ends_clearly_and_the_same_command_goes_on(
    name: str, code: int, source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)
    # These happen only where an older output is replaced, and where the workspace is removed.
    options = ("--overwrite",) if name == "unlink" else ()

    def prepare(output: Path) -> Path:
        if name == "unlink":
            output.mkdir()
            (output / "stale.safetensors").write_bytes(b"older")
            (output / MANIFEST).write_bytes(b"older")
        return output

    def chosen(call: Call) -> bool:
        return call.name == name and not call.path.startswith("expected")

    convert(source, prepare(scratch / "counted"), *options)
    count = sum(chosen(call) for call in calls.made)
    assert count
    for nth in spread(count):
        output = prepare(scratch / f"out{nth}")
        calls.fail(chosen, nth, code)
        result = convert(source, output, *options)
        calls.mend()
        if result.exit_code:
            assert result.exit_code == 1
            assert f"[{errno.errorcode[code]}]: {scratch}" in result.stderr
            assert "Run the same command again to resume" in result.stderr
            again = convert(source, output, *options)
            assert again.exit_code == 0, again.stderr
        assert published(output) == expected


def test_each_segment_reserves_its_own_blocks(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)

    def reserved() -> dict[str, list[tuple[int, int]]]:
        shards: dict[str, list[tuple[int, int]]] = {}
        for call in calls.made:
            name = Path(call.path).name
            if call.name == ALLOCATE and name.startswith("model-"):
                shards.setdefault(name, []).append(call.arguments[1:])
        calls.made.clear()
        return {name: sorted(ranges) for name, ranges in shards.items()}

    calls.fail(lambda call: call.name == "replace", 0, errno.EIO)
    assert convert(source, scratch / "out").exit_code == 1
    calls.mend()
    first = reserved()
    assert sorted(first) == ["model-1.safetensors", "model-2.safetensors"]
    for name, ranges in first.items():
        size = len(expected[name])
        assert ranges == [(start, min(SMALL, size - start)) for start in range(0, size, SMALL)]
    assert convert(source, scratch / "out").exit_code == 0
    assert reserved() == {}
    assert published(scratch / "out") == expected


def test_short_reads_and_writes_are_completed(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = {"preadv": os.preadv, "pwrite": os.pwrite}
    calls = watch(monkeypatch, scratch)
    shortened = 0

    def cut(call: Call, proceed: Callable[[], Any]) -> Any:
        nonlocal shortened
        if call.name not in real:
            return proceed()
        descriptor, data, offset = call.arguments
        piece = data[0] if call.name == "preadv" else data
        shortened += len(piece) > 1000
        piece = piece[: max(1, len(piece) // 2)]
        return real[call.name](descriptor, [piece] if call.name == "preadv" else piece, offset)

    calls.action = cut
    assert convert(source, scratch / "out").exit_code == 0
    assert shortened > 10
    assert published(scratch / "out") == expected


def test_a_write_that_writes_nothing_is_an_error_and_no_endless_loop(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)
    calls.action = lambda call, proceed: 0 if call.name == "pwrite" else proceed()
    result = convert(source, scratch / "out")
    assert result.exit_code == 1
    assert "took none of the bytes" in result.stderr
    calls.mend()
    assert convert(source, scratch / "out").exit_code == 0
    assert published(scratch / "out") == expected


@contextmanager
def alarms() -> Iterator[list[int]]:
    """Interrupt system calls 2,000 times a second with a signal whose handler returns."""
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        yield heard
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(method="thread")
def test_interrupted_calls_are_repeated(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """On a disk, where a sync takes long enough to be interrupted."""
    with alarms() as heard:
        result = convert(source, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert heard
    assert published(tmp_path / "out") == expected


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_file_systems_without_reservation_or_folder_sync_will_do(
    code: int, source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_prep.files.storage._fallocate", lambda *arguments: -1)
    monkeypatch.setattr("deepinfer_prep.files.storage.ctypes.get_errno", lambda: code)
    calls = watch(monkeypatch, scratch)

    def act(call: Call, proceed: Callable[[], Any]) -> Any:
        if call.name == "fsync":
            raise OSError(code, os.strerror(code))
        return proceed()

    calls.action = act
    assert convert(source, scratch / "out").exit_code == 0
    assert published(scratch / "out") == expected


def test_an_interrupted_reservation_is_repeated(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([-1, -1, 0])
    monkeypatch.setattr("deepinfer_prep.files.storage._fallocate", lambda *arguments: next(answers))
    monkeypatch.setattr("deepinfer_prep.files.storage.ctypes.get_errno", lambda: errno.EINTR)
    with RangeWriter(scratch / "x") as writer:
        writer.allocate(10)
    assert next(answers, None) is None


def test_a_lock_file_that_can_be_removed_only_once_it_is_closed(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where an open file that is removed stays in its folder under another name."""
    calls, kept = watch(monkeypatch, scratch), []

    def act(call: Call, proceed: Callable[[], Any]) -> Any:
        if call.name == "unlink" and call.path.endswith("/lock") and _is_open(call.path):
            kept.append(call)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return proceed()

    calls.action = act
    assert convert(source, scratch / "out").exit_code == 0
    assert tree(scratch / "out") == expected
    assert kept
    assert ".deepinfer-prep.done" not in os.listdir(scratch / "out")


def _is_open(path: str) -> bool:
    links = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return any(os.readlink(link).endswith(path) for link in links if os.path.lexists(link))


def test_the_first_error_is_the_one_that_is_told(source: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read fails, and so does every sync of what was written before it."""
    calls = watch(monkeypatch, scratch)

    def act(call: Call, proceed: Callable[[], Any]) -> Any:
        if (
            call.name == "preadv"
            and call.path == "source/model-2.safetensors"
            and sum(made.name == "pwrite" for made in calls.made)
        ):
            raise OSError(errno.EIO, "bad sector")
        if call.name == "fdatasync" and "files" in call.path:
            raise OSError(errno.EROFS, "read-only")
        return proceed()

    monkeypatch.setattr("deepinfer_prep.writing.segment_writer.COMMIT_BYTES", 2**40)
    calls.action = act
    result = convert(source, scratch / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: bad sector [EIO]: {source / 'model-2.safetensors'}.")
    assert published(scratch / "out") == {}


@pytest.mark.parametrize("refused", ["open", "pwrite"])
def test_file_systems_without_direct_writes_will_do(
    refused: str, source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)
    direct: set[int] = set()

    def act(call: Call, proceed: Callable[[], Any]) -> Any:
        is_direct = call.name == "open" and bool(call.arguments[1] & os.O_DIRECT)
        if (refused == "open" and is_direct) or (call.name == "pwrite" and call.arguments[0] in direct):
            direct.add(-1)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        result = proceed()
        if is_direct:
            direct.add(result)
        elif call.name == "open":
            direct.discard(result)
        return result

    calls.action = act
    assert convert(source, scratch / "out").exit_code == 0
    assert -1 in direct
    assert tree(scratch / "out") == expected


def test_a_segment_that_cannot_be_read_any_more_is_written_again(
    source: Path, expected: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, scratch)
    calls.fail(lambda call: call.name == "replace" and "/manifest.json." in call.path, 0, errno.EIO)
    assert convert(source, scratch / "out").exit_code == 1
    unreadable = []

    def act(call: Call, proceed: Callable[[], Any]) -> Any:
        if call.name == "preadv" and call.path.endswith("files/model-1.safetensors") and len(unreadable) < 2:
            unreadable.append(call)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return proceed()

    calls.action = act
    result = convert(source, scratch / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert len(unreadable) == 2
    assert tree(scratch / "out") == expected

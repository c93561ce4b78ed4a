"""Signals, exhausted memory and threads, and terminals that cannot express a name."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepinfer_prep.cli.console import emit, reported_errors
from deepinfer_prep.errors import PrepError, RefusedError
from deepinfer_prep.workers import run_parallel
from tests.hostile.checkpoints import convert, published
from tests.small_files import WEIGHT, write_file

HANDLED = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals are handled as in a shell, however pytest was started, and pytest's own handlers come back."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_stops_with_130_and_the_handlers_come_back(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(other) for other in HANDLED]

    def interrupted() -> None:
        with reported_errors(as_json=False, after_failure="All is well."):
            os.kill(os.getpid(), number)
            time.sleep(5)

    with pytest.raises(SystemExit) as caught:
        interrupted()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "stopped: interrupted. All is well.\n"
    assert [signal.getsignal(other) for other in HANDLED] == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As nohup and shells that start jobs in the background leave it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with reported_errors(as_json=False):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    done = []

    def work() -> None:
        with reported_errors(as_json=False):
            done.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGTERM)]


STUCK = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
real = os.pwrite
def write(*arguments):
    if threading.current_thread() is threading.main_thread():
        return real(*arguments)
    os.write(1, b"writing\\n")
    time.sleep(60)
os.pwrite = write
from deepinfer_prep.cli import main
main(sys.argv[1:])
"""
"""The command on a disk that never answers a worker's write."""


@pytest.mark.parametrize("second", HANDLED)
def test_a_second_signal_ends_a_run_whose_write_does_not_return(
    second: signal.Signals, source: Path, scratch: Path
) -> None:
    command = [sys.executable, "-c", STUCK, "convert", str(source), str(scratch / "out"), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(timeout=5) == -second
    assert convert(source, scratch / "out").exit_code == 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            "error: No space left on device [ENOSPC]: /x/y. Later.",
        ),
        (OSError("odd"), "error: odd [no error number]. Later."),
        (OSError(99999, "strange"), "error: strange [no error number]. Later."),
        (MemoryError(), "error: not enough memory. Use fewer --workers or a smaller --chunk-size. Later."),
        (PrepError("A sentence."), "error: A sentence."),
        (RefusedError(*("One.", "Two.")), "refused: One.\nrefused: Two."),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_errors_are_sentences(
    error: Exception, message: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, reported_errors(as_json, "Later."):
        raise error
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert printed.err == message + "\n"
    if as_json:
        data = json.loads(printed.out)
        assert [f"{data['status']}: {text}" for text in data["messages"]] == message.split("\n")
    else:
        assert printed.out == ""


def test_errors_nobody_expects_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), reported_errors(as_json=False):
        1 / 0  # noqa: B018


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("as_json", [False, True])
def test_names_that_the_terminal_cannot_express_are_escaped(
    encoding: str, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    names = ["\U0001f9ee", "\udce9", "plain"]
    emit(names, lambda found: " ".join(found), as_json, None)
    sys.stdout.flush()
    text = written.getvalue().decode(encoding)
    if as_json:
        assert json.loads(text) == names
    else:
        assert text == ("\U0001f9ee \\udce9 plain\n" if encoding == "utf-8" else "\\U0001f9ee \\udce9 plain\n")


def test_a_report_goes_into_a_new_folder_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emit([1], str, False, tmp_path / "new" / "report.json")
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == [1]
    with pytest.raises(SystemExit) as caught:
        emit([1], str, False, tmp_path / "new" / "report.json" / "below.json")
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == "[1]\n[1]\n"
    assert printed.err.startswith("error: the report could not be written: ")


def test_a_closed_pipe_behind_the_command_is_no_traceback(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT})
    command = f"{sys.executable} -m deepinfer_prep inspect {tmp_path} --quiet | true"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr


def test_threads_that_cannot_be_started_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(self: ThreadPoolExecutor, *arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with pytest.raises(PrepError, match=r"starts no more threads \(can't start new thread\). Use fewer --workers"):
        list(run_parallel([1, 2], lambda item, buffer: item, 2, 1024))


def test_memory_that_runs_out_in_a_thread_is_told(source: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def new_buffer(size: int) -> None:
        raise MemoryError

    monkeypatch.setattr("deepinfer_prep.workers.new_buffer", new_buffer)
    result = convert(source, scratch / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: not enough memory. Use fewer --workers or a smaller --chunk-size.")
    assert published(scratch / "out") == {}

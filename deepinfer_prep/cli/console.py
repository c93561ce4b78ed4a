"""How the commands print: progress on stderr, results on stdout, errors as sentences with an exit status."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from deepinfer_prep.cli.printable import printable
from deepinfer_prep.errors import PrepError, Reason, RefusedError

if TYPE_CHECKING:
    from deepinfer_prep.files.storage import Place
    from deepinfer_prep.workers import Progress, ProgressCallback

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_PLAIN_LINE_SECONDS = 5.0


def prepare_process() -> None:
    """Make the standard streams and the encoding of names what the rest relies on.

    A descriptor that is closed at the start would be given to the next file that is opened, and a message would be
    written into it. Where Python reads file names as ASCII, it is started again with UTF-8.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    is_command = sys.argv[0].endswith(("/deepinfer-prep", "/deepinfer_prep/__main__.py"))
    if is_command and sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def emit(result: Any, text: Callable[[Any], str], as_json: bool, report: Path | None) -> None:
    """Print a result as text or JSON, and write it to a report file where one is wanted."""
    from deepinfer_prep.cli.render import to_data

    # A report's figures are many, and encoding them takes longer than reading a small checkpoint.
    is_encoded = as_json or report is not None
    encoded = json.dumps(to_data(result), indent=1, allow_nan=False) if is_encoded else ""
    if report is not None:
        try:
            write_text(report, encoded + "\n")
        except OSError as error:
            tell(f"error: the report could not be written: {_describe(error)}")
            _print_or_fail(encoded if as_json else text(result))
            sys.exit(EXIT_FAILED)
    _print_or_fail(encoded if as_json else text(result))


def check_report(report: Path | None, as_json: bool, *places: Place) -> None:
    """Refuse a report file inside the source or the output, or in place of one of them."""
    if report is None:
        return
    target = os.path.realpath(report)
    for folder in (os.path.realpath(place) for place in places if isinstance(place, Path)):
        if target == folder or target.startswith(folder + os.sep):
            message = f"--report {report} lies in {folder}, which holds the checkpoint itself. Choose another place."
            _fail("refused", [Reason(message, "report-inside")], as_json)


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named, and the folders above it; somebody else's link is not followed.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    if path.is_symlink() and path.lstat().st_uid != os.geteuid():
        flags |= os.O_NOFOLLOW  # Somebody else's link may lead to a file that must not be lost.
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_RIGHT = "Change its permissions, or choose a place that you may read and write."


@contextmanager
def reported_errors(as_json: bool, after_failure: str = "") -> Iterator[None]:
    """Turn expected errors and interrupts into one message and an exit status; SIGTERM counts as an interrupt.

    `after_failure` says what a failure of the system or an interrupt leaves behind.
    """
    try:
        with _stopped_by_signals():
            yield
    except RefusedError as error:
        _fail("refused", error.reasons, as_json)
    except PrepError as error:
        _fail("error", [Reason(str(error), error.code)], as_json)
    except OSError as error:
        advice = _NO_RIGHT if error.errno in _FORBIDDEN else after_failure
        _fail("error", [Reason(f"{_describe(error)} {advice}".rstrip(), "system")], as_json)
    except MemoryError:
        message = f"not enough memory. Use fewer --workers or a smaller --chunk-size. {after_failure}".rstrip()
        _fail("error", [Reason(message, "memory")], as_json)
    except KeyboardInterrupt:
        message = f"interrupted. {after_failure}".rstrip()
        _fail("stopped", [Reason(message, "interrupted")], as_json, EXIT_INTERRUPTED)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt; the second one ends the process at once.

    A signal that was ignored stays ignored (nohup, background jobs); only the main thread may set handlers.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, _interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> NoReturn:
    for other in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(other) is _interrupt:
            signal.signal(other, signal.SIG_DFL)
    raise KeyboardInterrupt


def _describe(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "no error number")
    return f"{error.strerror or error} [{code}]{f': {error.filename}' if error.filename else ''}."


def _fail(kind: str, reasons: Sequence[Reason], as_json: bool, status: int = EXIT_FAILED) -> NoReturn:
    if as_json:
        codes = [reason.code for reason in reasons]
        _print_or_fail(json.dumps({"status": kind, "messages": reasons, "codes": codes}, indent=1))
    for reason in reasons:
        tell(f"{kind}: {reason}")
    sys.exit(status)


def tell(line: str) -> None:
    """Print one line on stderr, as far as it takes any: what nobody reads must not stop a conversion."""
    with suppress(OSError, ValueError):
        click.echo(_encodable(printable(line), sys.stderr), err=True)


def _print_or_fail(text: str) -> None:
    """Print lines that are `printable` on stdout; where it takes no more, say so and end with an exit status."""
    try:
        click.echo(_encodable(text, sys.stdout))
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # Whoever read it has seen enough.
        _silence_stdout()
        sys.exit(EXIT_FAILED)
    except OSError as error:
        _silence_stdout()
        tell(f"error: the result could not be printed: {_describe(error)}")
        sys.exit(EXIT_FAILED)


def _silence_stdout() -> None:
    """Let the interpreter's last flush find a stream that takes everything."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _encodable(text: str, stream: Any) -> str:
    """The text with characters escaped that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


@contextmanager
def progress_display(quiet: bool) -> Iterator[ProgressCallback | None]:
    """A tqdm bar in bytes where stderr is a terminal, a plain line now and then where it is not."""
    if quiet or sys.stderr is None:
        yield None
    elif sys.stderr.isatty():
        display = _Bar()
        try:
            yield display
        finally:
            display.close()
    else:
        yield _PlainLines()


class _Bar:
    def __init__(self) -> None:
        self._stage: str | None = None
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        from tqdm import tqdm

        with suppress(OSError, ValueError):  # A terminal that is gone must not stop a conversion.
            if progress.stage != self._stage:
                self.close()
                self._stage = progress.stage
                self._bar = tqdm(
                    total=progress.total, desc=progress.stage, unit="B", unit_scale=True, file=sys.stderr, leave=False
                )
            self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.close()


class _PlainLines:
    def __init__(self) -> None:
        self._stage: str | None = None
        self._next = 0.0
        self._started = 0.0
        self._first = 0

    def __call__(self, progress: Progress) -> None:
        from deepinfer_prep.files.sizes import format_size

        if progress.total == 0:
            return
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._next = progress.stage, now + _PLAIN_LINE_SECONDS
            self._started, self._first = now, progress.done
        if progress.done < progress.total and now < self._next:
            return
        self._next = now + _PLAIN_LINE_SECONDS
        percent = 100 * progress.done // progress.total
        line = f"{progress.stage}: {format_size(progress.done)} of {format_size(progress.total)} ({percent} %)"
        done, seconds = progress.done - self._first, now - self._started
        if done > 0 and seconds >= 1:
            left = round((progress.total - progress.done) * seconds / done)
            line += f", {format_size(round(done / seconds))}/s"
            line += f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left" if left else ""
        tell(line)

"""How commands talk: progress on stderr, results on stdout, errors as sentences with an exit status."""

from __future__ import annotations

import errno
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from deepinfer_prep.errors import PrepError, Reason, RefusedError

if TYPE_CHECKING:
    from deepinfer_prep.workers import Progress, ProgressCallback

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_PLAIN_LINE_SECONDS = 5.0


def emit(result: Any, text: Callable[[Any], str], as_json: bool, report: Path | None) -> None:
    """Print a result as text or JSON, and write it to a report file where one is wanted."""
    from deepinfer_prep.cli.render import to_data

    encoded = json.dumps(to_data(result), indent=1)
    _print(encoded if as_json else text(result))
    if report is not None:
        try:
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(encoded + "\n", encoding="utf-8")
        except OSError as error:
            click.echo(f"error: the report could not be written: {_describe(error)}", err=True)
            sys.exit(EXIT_FAILED)


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
        _fail("error", [Reason(f"{_describe(error)} {after_failure}".rstrip(), "system")], as_json)
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
        _print(json.dumps({"status": kind, "messages": reasons, "codes": codes}, indent=1))
    for reason in reasons:
        click.echo(f"{kind}: {reason}", err=True)
    sys.exit(status)


def _print(text: str) -> None:
    """Print on stdout; names that its encoding cannot express are escaped rather than fatal."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding))


@contextmanager
def progress_display(quiet: bool) -> Iterator[ProgressCallback | None]:
    """A tqdm bar in bytes where stderr is a terminal, a plain line now and then where it is not."""
    if quiet:
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

        if progress.stage != self._stage:
            self.close()
            self._stage = progress.stage
            self._bar = tqdm(
                total=progress.total, desc=progress.stage, unit="B", unit_scale=True, file=sys.stderr, leave=False
            )
        self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _PlainLines:
    def __init__(self) -> None:
        self._stage: str | None = None
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        from deepinfer_prep.files.sizes import format_size

        if progress.total == 0:
            return
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._next = progress.stage, now + _PLAIN_LINE_SECONDS
        if progress.done < progress.total and now < self._next:
            return
        self._next = now + _PLAIN_LINE_SECONDS
        percent = 100 * progress.done // progress.total
        click.echo(
            f"{progress.stage}: {format_size(progress.done)} of {format_size(progress.total)} ({percent} %)", err=True
        )

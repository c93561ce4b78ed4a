"""How commands talk: progress on stderr, results on stdout, errors as sentences with an exit status."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from deepinfer_prep.errors import PrepError, RefusedError

if TYPE_CHECKING:
    from deepinfer_prep.progress import Progress, ProgressCallback

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_PLAIN_LINE_SECONDS = 5.0


def emit(result: Any, text: Callable[[Any], str], as_json: bool, report: Path | None) -> None:
    """Print a result as text or JSON, and write it to a report file where one is wanted."""
    from deepinfer_prep.render import to_data

    encoded = json.dumps(to_data(result), indent=1, ensure_ascii=False)
    if report is not None:
        report.write_text(encoded + "\n", encoding="utf-8")
    click.echo(encoded if as_json else text(result))


@contextmanager
def reported_errors(as_json: bool) -> Iterator[None]:
    """Turn expected errors and interrupts into one message and an exit status; SIGTERM counts as an interrupt."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except RefusedError as error:
        _fail("refused", list(error.reasons), as_json, EXIT_FAILED)
    except PrepError as error:
        _fail("error", [str(error)], as_json, EXIT_FAILED)
    except OSError as error:
        _fail("error", [_describe(error)], as_json, EXIT_FAILED)
    except KeyboardInterrupt:
        message = "interrupted. What was written is kept aside; the same command goes on from there."
        _fail("stopped", [message], as_json, EXIT_INTERRUPTED)


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _describe(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return (
        f"{error.strerror or error}{where}. Nothing unfinished has its final name; once this is mended, "
        "the same command goes on."
    )


def _fail(kind: str, messages: list[str], as_json: bool, status: int) -> NoReturn:
    if as_json:
        click.echo(json.dumps({"status": kind, "messages": messages}, indent=1, ensure_ascii=False))
    for message in messages:
        click.echo(f"{kind}: {message}", err=True)
    sys.exit(status)


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
        from deepinfer_prep.sizes import format_size

        ended = progress.done >= progress.total > 0
        if progress.stage == self._stage and not ended and time.monotonic() < self._next:
            return
        if progress.stage != self._stage and not ended and progress.total > 0:
            self._stage, self._next = progress.stage, time.monotonic() + _PLAIN_LINE_SECONDS
            return
        if progress.total == 0:
            return
        self._stage, self._next = progress.stage, time.monotonic() + _PLAIN_LINE_SECONDS
        percent = 100 * progress.done // progress.total
        click.echo(
            f"{progress.stage}: {format_size(progress.done)} of {format_size(progress.total)} ({percent} %)", err=True
        )

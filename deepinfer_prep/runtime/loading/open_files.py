"""Files that are opened when something is read from them; few are open at a time, however many a checkpoint has."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepinfer_prep.files.storage import RangeReader

_MOST_OPEN = 128
_SHARE = 8
"""One in so many of the descriptors that the process may have; its model, sockets and devices need the others."""


@dataclass(slots=True)
class _Open:
    reader: RangeReader
    users: int = 0


class OpenFiles:
    """Readers of files: those in use, and the ones used last up to a limit; for several threads.

    Args:
        most: how many stay open; those in use are never closed, so a thread may have one more.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = _most_open() if most is None else most
        self._open: OrderedDict[Path, _Open] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def use(self, path: Path, check: Callable[[RangeReader], None]) -> Iterator[RangeReader]:
        """A reader of a file, which is opened where it is not open yet, and then `check`ed.

        Raises:
            PrepError, OSError: it cannot be opened, or `check` found that it is another file by now.
        """
        with self._lock:
            found = self._open.get(path)
            if found is None:
                found = self._open[path] = _Open(_opened(path, check))
            found.users += 1
            self._open.move_to_end(path)
            self._close_idle(self._most)
        try:
            yield found.reader
        finally:
            with self._lock:
                found.users -= 1
                if not found.users and self._open.get(path) is not found:
                    found.reader.close()

    def drop(self, path: Path) -> None:
        """Close a file; a thread that reads from it now does so once it is done."""
        with self._lock:
            found = self._open.pop(path, None)
            if found is not None and not found.users:
                found.reader.close()

    def _close_idle(self, most: int) -> None:
        """Close the files used longest ago until only so many are open, or all are in use."""
        idle = [path for path, found in self._open.items() if not found.users] if len(self._open) > most else []
        for path in idle[: len(self._open) - most]:
            self._open.pop(path).reader.close()


def _opened(path: Path, check: Callable[[RangeReader], None]) -> RangeReader:
    reader = RangeReader(path)
    try:
        check(reader)
    except BaseException:
        reader.close()
        raise
    return reader


def _most_open() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, allowed // _SHARE))

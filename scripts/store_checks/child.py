"""The command line in a process of its own that writes down every request to the store, and can die before one.

    python -m store_checks.child LOG STOP convert SOURCE OUTPUT

LOG gets one line a request: operation, range of bytes, URL. The process ends, as if killed, before it sends the first
request in whose line the pattern STOP is found; an empty STOP lets it run. At its end LOG.peak gets the most memory
that it had: what the system tells the parent counts the parent's own before the process became another program.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deepinfer_prep.cli.main import main
from deepinfer_prep.remote.s3 import client


def watch(log: int, stop: str) -> None:
    """Write down what the client of this process sends, repeated requests as well."""

    def sending(request: Any, event_name: str, **more: Any) -> None:
        asked = request.headers.get("Range") or "-"
        asked = asked.decode() if isinstance(asked, bytes) else asked
        line = f"{event_name.rpartition('.')[2]} {asked} {unquote(request.url)}\n"
        if stop and re.search(stop, line):
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(log, line.encode())

    client().meta.events.register("before-send.s3", sending)


def note_peak(file: Path) -> None:
    """Write down the most memory that this process had, in bytes."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    file.write_text(str(int(match[1]) * 1024 if match else 0))


if __name__ == "__main__":
    atexit.register(note_peak, Path(sys.argv[1] + ".peak"))
    watch(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), sys.argv[2])
    main(sys.argv[3:])

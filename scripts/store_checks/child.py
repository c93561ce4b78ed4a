"""The command line in a process of its own that writes down every request to the store, and can die before one.

    python -m store_checks.child LOG STOP convert SOURCE OUTPUT

LOG gets one line a request: operation, range of bytes, URL. The process ends, as if killed, before it sends the first
request in whose line the pattern STOP is found; an empty STOP lets it run.
"""

from __future__ import annotations

import os
import re
import signal
import sys
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


if __name__ == "__main__":
    watch(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), sys.argv[2])
    main(sys.argv[3:])

"""Starts the command line in processes of its own and tells what they said, sent and took."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_SCRIPTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ended:
    """A process that ended."""

    status: int
    output: str
    requests: tuple[str, ...]
    """Operation, range of bytes and URL of every request."""
    seconds: float
    peak_bytes: int
    """Memory; 0 where it was killed."""

    @property
    def counts(self) -> Counter[str]:
        """Requests by operation."""
        return Counter(line.partition(" ")[0] for line in self.requests)

    def sent_parts(self, bucket: str) -> set[tuple[str, int]]:
        """Key and number of every part that was sent."""
        found = set()
        for line in self.requests:
            match = re.match(rf"UploadPart - \S+?/{bucket}/(\S+)\?.*partNumber=(\d+)", line)
            if match is not None:
                found.add((match[1], int(match[2])))
        return found


class Running:
    """A command that was started."""

    def __init__(self, *arguments: str, stop: str = "", **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log, self._said = Path(self._folder.name, "log"), Path(self._folder.name, "said")
        self._log.touch()
        command = [sys.executable, "-m", "store_checks.child", str(self._log), stop, *arguments]
        self._started = time.monotonic()
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                command, cwd=_SCRIPTS, env={**os.environ, **environment}, stdout=said, stderr=subprocess.STDOUT
            )

    def kill(self, after: float) -> None:
        """Kill it after some seconds; one that has ended by then stays as it is."""
        time.sleep(after)
        os.kill(self._process.pid, signal.SIGKILL)

    def end(self) -> Ended:
        """Wait for the end."""
        self._process.wait()
        seconds = time.monotonic() - self._started
        requests = tuple(self._log.read_text().splitlines())
        said = " ".join(self._said.read_text(errors="replace").split())
        noted = self._log.with_suffix(".peak")
        peak = int(noted.read_text()) if noted.exists() else 0
        self._folder.cleanup()
        return Ended(self._process.returncode, said, requests, seconds, peak)


def run(*arguments: str, stop: str = "", **environment: str) -> Ended:
    """Run a command to its end."""
    return Running(*arguments, stop=stop, **environment).end()

"""The two cores of a launch: programs run one at a time, and hand over at a barrier.

Program 0 runs until it ends or reaches a core_barrier, then program 1, and so on in turn. So a program sees what the
other wrote only after a barrier, and a run gives the same result every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .context import Program, activate


class _Abandoned(BaseException):
    """Ends a program's thread after the other one failed."""


class _Core:
    """One program in its own thread."""

    def __init__(self, program: Program, body: Callable[[], Any]) -> None:
        self.program = program
        self.body = body
        self.result: Any = None
        self.error: BaseException | None = None
        self.barrier: Any = None
        """What it waits for, while it waits."""
        self.done = False
        self._abandoned = False
        self._resume = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        self._resume.acquire()
        try:
            if not self._abandoned:
                activate(self.program)
                self.result = self.body()
        except _Abandoned:
            pass
        except BaseException as error:  # handed to the launching thread
            self.error = error
        self.done = True
        self._paused.release()

    def wait_at(self, barrier: Any) -> None:
        """Called in the program's thread: let the others run until all wait here."""
        self.barrier = barrier
        self._paused.release()
        self._resume.acquire()
        if self._abandoned:
            raise _Abandoned

    def run(self) -> None:
        """Let it run until it ends or waits."""
        if not self._thread.is_alive():
            self._thread.start()
        self._resume.release()
        self._paused.acquire()

    def abandon(self) -> None:
        """End its thread without running any more of it."""
        self._abandoned = True
        if self._thread.is_alive():
            self._resume.release()
            self._thread.join()


def run_programs(programs: list[Program], body: Callable[[], Any], cross: Callable[[list[Any]], None]) -> list[Any]:
    """Run `body` as every program and return its results. `cross` is told what each waits for (None if it ended)."""
    cores = [_Core(program, body) for program in programs]
    for core in cores:
        core.program.core = core
    try:
        while not all(core.done for core in cores):
            for core in cores:
                if not core.done:
                    core.barrier = None
                    core.run()
                if core.error is not None:
                    raise core.error
            if any(core.barrier is not None and not core.done for core in cores):
                cross([None if core.done else core.barrier for core in cores])
    finally:
        for core in cores:
            core.abandon()
            core.program.core = None
    return [core.result for core in cores]

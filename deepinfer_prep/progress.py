"""How long work tells a caller how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` bytes of a stage such as "convert"."""

    stage: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Adds up the bytes of one stage and reports each step."""

    def __init__(self, callback: ProgressCallback | None, stage: str, total: int) -> None:
        self._callback, self._stage, self._total, self._done = callback, stage, total, 0
        self.add(0)

    def add(self, count: int) -> None:
        """Report `count` more bytes."""
        self._done += count
        if self._callback is not None:
            self._callback(Progress(self._stage, self._done, self._total))

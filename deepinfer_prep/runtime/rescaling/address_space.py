"""Whether host memory may be changed: not where it is mapped read-only, nor where changes would reach a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer_prep.runtime.rescaling.byte_spans import I64, Spans

_MAPS = Path("/proc/self/maps")
_HIGHEST = int(np.iinfo(np.int64).max)
_NO_FILES = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")
"""Shared memory between processes, which the kernel shows with a path although no file stands behind it."""


@dataclass(frozen=True, slots=True)
class Mappings:
    """This process's address space as Linux lists it (proc(5), /proc/pid/maps)."""

    starts: I64
    stops: I64
    problems: tuple[str, ...]
    """For every mapping why it must not be written to; empty where it may."""

    def problem(self, spans: Spans) -> str:
        """Why some bytes of host memory must not be written to, as a sentence part; empty if they may."""
        if spans.space != "cpu" or not len(self.starts) or not len(spans.starts):
            return ""
        first = np.searchsorted(self.starts, spans.starts, side="right") - 1
        last = np.searchsorted(self.starts, spans.stops - 1, side="right") - 1
        touched: I64 = np.unique(np.concatenate([first, last]))
        found = (self.problems[index] for index in touched if index >= 0)
        return next(filter(None, found), "")


def mappings() -> Mappings:
    """Read the mappings of this process; none where the system does not list them."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        lines = []
    fields = [line.split(maxsplit=5) for line in lines]
    # The highest mapping (vsyscall) lies beyond int64, where no tensor does.
    ends = [[min(int(end, 16), _HIGHEST) for end in field[0].split("-")] for field in fields]
    bounds: I64 = np.array(ends, dtype=np.int64).reshape(-1, 2)
    problems = tuple(_problem(field[1], field[5] if len(field) > 5 else "") for field in fields)
    return Mappings(bounds[:, 0], bounds[:, 1], problems)


def _problem(permissions: str, path: str) -> str:
    if "w" not in permissions:
        return f"lies in memory that is mapped read-only ({path or 'no file'}). Load a copy instead of a view."
    if permissions.endswith("s") and path.startswith("/") and not path.startswith(_NO_FILES):
        return f"is a shared mapping of {path}: changing it would change that file. Load a copy or map it privately."
    return ""

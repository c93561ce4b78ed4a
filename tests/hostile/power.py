"""What a power cut does to a disk, at its worst: whatever was not synced is lost.

Bytes written since a file's last fdatasync turn into rubbish, renames in a folder that was not synced since
are undone, the latest first.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.calls import Call, SystemCalls


class Disk:
    """Keeps what is not durable yet; call `cut` once the process is dead."""

    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls
        self._unsynced: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._renames: list[tuple[Path, Path, bytes | None]] = []

    def kill(self, nth: int) -> None:
        """Carry out `nth` calls and none after them; see `SystemCalls.kill`."""
        self._calls.kill(nth)
        carry_out = self._calls.action

        def act(call: Call, proceed: Callable[[], Any]) -> Any:
            before = self._before(call)
            result = carry_out(call, proceed)
            self._after(call, result, before)
            return result

        self._calls.action = act

    def cut(self) -> None:
        """Lose everything that was not synced."""
        self._calls.bury()
        for source, target, replaced in reversed(self._renames):
            if target.exists():
                source.parent.mkdir(parents=True, exist_ok=True)
                os.replace(target, source)
                if replaced is not None:
                    target.write_bytes(replaced)
        undone = {str(target): str(source) for source, target, _ in self._renames}
        for name, ranges in self._unsynced.items():
            path = self._calls.root / name
            path = Path(undone.get(str(path), path))
            if not path.is_file():
                continue
            with path.open("r+b") as file:
                for offset, count in ranges:
                    file.seek(offset)
                    file.write(b"\xaa" * count)

    def _before(self, call: Call) -> bytes | None:
        target = Path(call.arguments[1]) if call.name == "replace" else None
        return target.read_bytes() if target is not None and target.is_file() else None

    def _after(self, call: Call, result: Any, replaced: bytes | None) -> None:
        if call.name == "pwrite":
            self._unsynced[call.path].append((call.arguments[2], result))
        elif call.name == "fdatasync":
            self._unsynced.pop(call.path, None)
        elif call.name == "fsync":
            folder = self._calls.root / call.path
            self._renames = [rename for rename in self._renames if rename[1].parent != folder]
        elif call.name == "replace":
            source, target = Path(call.arguments[0]), Path(call.arguments[1])
            self._renames.append((source, target, replaced))
            moved = self._unsynced.pop(call.path, None)
            if moved:
                self._unsynced[os.path.relpath(target, self._calls.root)] = moved

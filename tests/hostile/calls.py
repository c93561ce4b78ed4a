"""Stands between the converter and the system calls of its write path: records them, lets one fail, or stops them all.

Only calls on files below one folder are touched, so that pytest's own files keep working.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep.files import storage

BY_DESCRIPTOR = ("ftruncate", "preadv", "pwrite", "fdatasync", "fsync", "close")
BY_PATH = ("open", "mkdir", "replace", "unlink", "rmdir")
ALLOCATE = "fallocate"


class Killed(BaseException):
    """What a process that was killed does next: nothing."""


@dataclass(frozen=True)
class Call:
    """One system call: its name, the path it concerns, relative to the watched folder, and its arguments."""

    name: str
    path: str
    arguments: tuple[Any, ...]


Action = Callable[[Call, Callable[[], Any]], Any]
"""Gets a call and what carries it out; returns or raises what the caller sees."""


@dataclass
class SystemCalls:
    """The calls that were made, and what happens to each; by default it is carried out."""

    root: Path
    made: list[Call] = field(default_factory=list)
    action: Action = lambda call, proceed: proceed()
    opened: set[int] = field(default_factory=set)

    def intercept(self, call: Call, proceed: Callable[[], Any]) -> Any:
        self.made.append(call)
        if call.name != "open":
            return self.action(call, proceed)
        descriptor = self.action(call, proceed)
        self.opened.add(descriptor)
        return descriptor

    def fail(self, chosen: Callable[[Call], bool], nth: int, code: int) -> None:
        """Let the nth of the chosen calls fail once with an error number."""
        left = [nth]

        def act(call: Call, proceed: Callable[[], Any]) -> Any:
            if chosen(call):
                left[0] -= 1
                if left[0] == -1:
                    if call.name == "close":
                        proceed()  # Linux gives the descriptor back even where close reports an error.
                    raise OSError(code, os.strerror(code), *call.arguments[: call.name in BY_PATH])
            return proceed()

        self.action = act

    def kill(self, nth: int, chosen: Callable[[Call], bool] = lambda call: True) -> None:
        """Carry out `nth` of the chosen calls and nothing after them, whatever the code does in its clean-up."""
        left = [nth]

        def act(call: Call, proceed: Callable[[], Any]) -> Any:
            left[0] -= left[0] >= 0 and chosen(call)
            if left[0] < 0:
                raise Killed
            return proceed()

        self.action = act

    def mend(self) -> None:
        """Carry out every call again."""
        self.action = lambda call, proceed: proceed()

    def bury(self) -> None:
        """Take from a dead process what the kernel takes: its descriptors, and with them its locks."""
        self.mend()
        for descriptor in self.opened:
            with suppress(OSError):  # Most were closed long ago.
                os.close(descriptor)
        self.opened.clear()


def watch(monkeypatch: pytest.MonkeyPatch, root: Path) -> SystemCalls:
    """Intercept the calls that concern files below `root`."""
    calls = SystemCalls(root)

    def intercepted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            path = _path_of(arguments[0], keywords.get("dir_fd", keywords.get("src_dir_fd")))
            if path is None or not path.startswith(str(root)):
                return real(*arguments, **keywords)
            told = arguments
            if name == "replace":
                told = (path, _path_of(arguments[1], keywords.get("dst_dir_fd")))
            made = Call(name, os.path.relpath(path, root), told)
            return calls.intercept(made, lambda: real(*arguments, **keywords))

        return call

    for name in (*BY_DESCRIPTOR, *BY_PATH):
        monkeypatch.setattr(os, name, intercepted(name, getattr(os, name)))
    monkeypatch.setattr(storage, "reserve_blocks", intercepted(ALLOCATE, storage.reserve_blocks))
    accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps its own references to these.
    for name in ("mkdir", "unlink") if accessor else ():
        monkeypatch.setattr(accessor, name, staticmethod(getattr(os, name)))
    return calls


def _path_of(target: Any, folder: int | None) -> str | None:
    try:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}").removesuffix(" (deleted)")
        path = os.fspath(target)
        base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
        return os.path.join(base, os.fsdecode(path))
    except (OSError, TypeError, ValueError):
        return None

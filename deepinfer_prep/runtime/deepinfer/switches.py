"""Attributes of a module that are the environment's switches: read and set in one place, whoever looks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast


class Switch:
    """Makes a module attribute the value of an environment variable that turns something off with "0"."""

    def __init__(self, variable: str, is_on: Callable[[], bool]) -> None:
        self._variable, self._is_on = variable, is_on

    def __get__(self, module: ModuleType | None, owner: type | None = None) -> bool:
        return self._is_on()

    def __set__(self, module: ModuleType, value: bool) -> None:
        os.environ[self._variable] = "1" if value else "0"


def install(name: str, **switches: Switch) -> None:
    """Give a module that is being imported attributes that are switches."""
    module = sys.modules[name]
    kind = type("ModuleWithSwitches", (ModuleType,), cast(dict[str, Any], switches))
    module.__class__ = kind

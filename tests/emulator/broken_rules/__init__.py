"""Kernel code that breaks one rule each, registered in CASES when its module is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nki_emulator.errors import Rule

from tests.emulator.support import execute


@dataclass(frozen=True)
class Case:
    """A launch that breaks `rule` in `op`, at `operand`."""

    name: str
    rule: Rule
    op: str
    operand: str
    launch: Callable[[], Any]


CASES: list[Case] = []


def breaks(rule: Rule, op: str, operand: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register kernel code."""

    def register(body: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(body.__name__, rule, op, operand, lambda: execute(body)))
        return body

    return register


def breaks_launch(rule: Rule, op: str, operand: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register host code that launches a kernel."""

    def register(launch: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(launch.__name__, rule, op, operand, launch))
        return launch

    return register

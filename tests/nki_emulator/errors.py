"""What the emulator raises."""

from __future__ import annotations

from dataclasses import dataclass


class EmulatorError(Exception):
    """Anything the emulator has to say against a kernel or a call."""


@dataclass(frozen=True)
class Rule:
    """One rule of the hardware, the compiler or the language, and the public page that states it."""

    name: str
    statement: str
    source: str


class RuleError(EmulatorError):
    """A kernel broke a rule. The message names the operation, the operand, what was found, and where."""

    def __init__(self, rule: Rule, op: str, operand: str, found: str, location: str) -> None:
        self.rule = rule
        self.op = op
        self.operand = operand
        self.found = found
        self.location = location
        subject = f"{op}: {operand}" if operand else op
        super().__init__(
            f"{subject}: {found}\n  rule {rule.name}: {rule.statement}\n  source: {rule.source}\n  at {location}"
        )


class UnknownNameError(RuleError, AttributeError):
    """A name that the real package may have and the emulated subset does not."""

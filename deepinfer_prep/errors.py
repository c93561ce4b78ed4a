"""Every error that this package raises on purpose.

A message is one or more whole sentences for the person who has to act: which file and tensor, what was
expected, what was found, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def list_some(items: Sequence[Item], most: int, show: Callable[[Item], str] = str) -> str:
    """The first `most` of many things, for a message: "a, b, c and 1,204 more"."""
    listed = ", ".join(show(item) for item in items[:most])
    return f"{listed} and {len(items) - most:,} more" if len(items) > most else listed


class PrepError(Exception):
    """Base of all errors raised on purpose; commands print its message and exit with status 1.

    `code` is a short name of what is wrong: it stays the same when the words of the message change.
    """

    code = "failed"

    def __init__(self, message: str, *, code: str = "") -> None:
        # Exception.__new__ has kept the message; torch.compile, which meets this, cannot trace a call of super().
        if code:
            self.code = code


class ContainerError(PrepError):
    """A file is not a well-formed safetensors file."""

    code = "bad-safetensors"


class CheckpointError(PrepError):
    """A folder of files is not a consistent checkpoint."""

    code = "bad-checkpoint"


class Reason(str):
    """A whole sentence that says why something is refused, with its `code` (as in `PrepError`)."""

    code: str

    def __new__(cls, sentence: str, code: str = "refused") -> Reason:
        """The sentence itself where it has a code already."""
        if isinstance(sentence, Reason):
            return sentence
        reason = super().__new__(cls, sentence)
        reason.code = code
        return reason


class RefusedError(PrepError):
    """The plan stands against the safety rules: nothing was written.

    `reasons` holds every refusal, each a whole sentence with a code; `code` is that of the first.
    """

    def __init__(self, *reasons: str, code: str = "refused") -> None:
        self.reasons = tuple(Reason(reason, code) for reason in reasons)
        self.args = ("\n".join(reasons),)
        self.code = self.reasons[0].code


class ConversionError(PrepError):
    """Writing the output failed or was interrupted; a new run with the same arguments resumes it."""

    code = "conversion-failed"


class ManifestError(PrepError):
    """A folder is not a finished output of this tool, or not one that this version can read."""

    code = "bad-manifest"


class NeuronUnavailableError(PrepError):
    """A Neuron package is absent, or is the empty placeholder that raises on import."""

    code = "no-neuron-package"


class LegalizationError(PrepError):
    """A graph holds something that has no exact byte form.

    `operation` names it as the user wrote it, `where` is the line of user code that it comes from.
    """

    code = "not-compilable"

    def __init__(self, operation: str, where: str, reason: str) -> None:
        self.operation = operation
        self.where = where
        # Exception.__new__ has kept the three arguments as they came.
        self.args = (f"{operation} cannot be compiled: {reason}\n  at {where}",)


class BackendOptionError(PrepError):
    """An option of torch.compile, or the environment variable behind it, is not one that exists."""

    code = "bad-backend-option"


class LeftoverFp8Error(PrepError):
    """The checker found an fp8 dtype in a graph that had been legalized: a defect of this package."""

    code = "fp8-left-over"

"""What the backend raises when it cannot promise eager's numbers."""

from __future__ import annotations

from deepinfer_prep.errors import PrepError


class LegalizationError(PrepError):
    """A graph holds something that has no exact byte form.

    `operation` names it as the user wrote it, `where` is the line of user code that it comes from.
    """

    def __init__(self, operation: str, where: str, reason: str) -> None:
        self.operation = operation
        self.where = where
        super().__init__(f"{operation} cannot be compiled: {reason}\n  at {where}")


class BackendOptionError(PrepError):
    """An option of torch.compile, or the environment variable behind it, is not one that exists."""


class LeftoverFp8Error(PrepError):
    """The checker found an fp8 dtype in a graph that had been legalized: a defect of this package."""

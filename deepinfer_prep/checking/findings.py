"""The differences that verification finds: all are counted, the first hundred are described."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DESCRIBED = 100


@dataclass(frozen=True, slots=True)
class Difference:
    """One finding. `tensor` and `element` are None where the finding is about a whole file or tensor."""

    file: str
    problem: str
    tensor: str | None = None
    element: int | None = None

    def __str__(self) -> str:
        where = self.file
        if self.tensor is not None:
            where += f": tensor {self.tensor!r}"
        if self.element is not None:
            where += f": element {self.element:,}"
        return f"{where}: {self.problem}"


class Findings:
    """Collects differences; all are counted, the first ones are kept."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[Difference] = []

    def add(self, difference: Difference, count: int = 1) -> None:
        """Add a difference that stands for `count` differing elements or facts."""
        self.count += count
        if len(self.first) < MOST_DESCRIBED:
            self.first.append(difference)

"""What the rest knows of engines: how work is handed to one, and how its results come back."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Protocol, TypeVar

from deepinfer_prep import fp8

Item = TypeVar("Item")
Result = TypeVar("Result")
ItemOf = TypeVar("ItemOf", contravariant=True)
ResultOf = TypeVar("ResultOf", covariant=True)


class Work(Protocol[ItemOf, ResultOf]):
    """What is done with every item, called from several threads; picklable where an engine is remote."""

    def __call__(self, item: ItemOf, buffer: fp8.U8) -> ResultOf:
        """Do one piece of work; `buffer` is this thread's to use."""

    def check(self) -> None:
        """Make sure that this process sees the files that the plan was made with; for processes elsewhere.

        Raises:
            PrepError, OSError: it does not.
        """


class Engine(Protocol):
    """Carries out independent pieces of work in parallel."""

    @property
    def is_remote(self) -> bool:
        """Whether work is done by other processes, maybe on other machines: nothing is shared with them but files."""

    def run(
        self, work: Work[Item, Result], sources: Iterable[Iterable[Item]], count: int, chunk_size: int
    ) -> Generator[Result, None, None]:
        """Yield work(item, buffer) for every item, in the order of completion.

        The first error stops the hand-out of items and is raised after the pieces that are under way have ended and
        their results were yielded.

        Args:
            sources: items by what they belong to, such as a file; those of one source are handed out in order.
            count: how many items there are in all.
            chunk_size: bytes of each buffer.
        """

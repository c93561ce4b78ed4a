"""Patterns that names of tensors and modules are matched with, none of which can take long, whoever wrote them.

In the project's own patterns `*` stands for any characters, dots included, and every other character for itself. Those
of a checkpoint's config are regular expressions, whose matching has a time limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.files.untrusted import shorten

SECONDS = 10.0
"""Time for all that one pattern of a config is matched with; a pattern of sound form needs milliseconds."""
_LONGEST = 10_000


@dataclass(frozen=True, slots=True)
class NameMatch:
    """What each `*` of a pattern stood for."""

    found: tuple[str, ...]

    def groups(self) -> tuple[str, ...]:
        """The texts in the order of the `*`."""
        return self.found


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern with `*`; `parts` are the texts between them."""

    parts: tuple[str, ...]

    def fullmatch(self, name: str) -> NameMatch | None:
        """Match a whole name; each `*` takes as much as it can, the first one first.

        The parts are looked for from the end, each as far right as it can be, which gives the same without trying one
        place after another: the time is that of finding each part once.
        """
        first, last = self.parts[0], self.parts[-1]
        if len(self.parts) == 1:
            return NameMatch(()) if name == first else None
        if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
            return None
        # Backwards, as only searching forwards takes a time that grows with the length alone.
        backwards, begin, end = name[::-1], len(last), len(name) - len(first)
        found = []
        for part in reversed(self.parts[1:-1]):
            place = backwards.find(part[::-1], begin, end)
            if place < 0:
                return None
            found.append(backwards[begin:place][::-1])
            begin = place + len(part)
        found.append(backwards[begin:end][::-1])
        return NameMatch(tuple(reversed(found)))


def compile_pattern(pattern: str) -> NamePattern:
    """A pattern of names, in which each `*` stands for any characters."""
    return NamePattern(tuple(pattern.split("*")))


def fill_pattern(pattern: str, matched: tuple[str, ...]) -> str:
    """A pattern with its first `*` replaced by the first matched text, its second by the second, and so on."""
    head, *parts = pattern.split("*")
    return head + "".join(text + part for text, part in zip(matched, parts, strict=False))


class ForeignPattern:
    """A regular expression of a config, matched from the start of a name as compressed-tensors does.

    Raises:
        ValueError: it is no regular expression.
        CheckpointError: it is too long or too deep to be compiled.
    """

    def __init__(self, pattern: str) -> None:
        # Imported here, as few checkpoints have such patterns and importing it takes as long as all the rest.
        import regex  # type: ignore[import-untyped,unused-ignore]

        self._text, self._left = pattern, SECONDS
        if len(pattern) > _LONGEST:
            raise self._refused(f"is longer than {_LONGEST:,} characters")
        try:
            self._compiled: Any = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(str(error)) from None
        except (OverflowError, RecursionError, MemoryError) as error:
            raise self._refused(f"cannot be compiled ({type(error).__name__})") from None

    def match(self, name: str) -> bool:
        """Whether a name begins with what the pattern describes.

        Raises:
            CheckpointError: all matches of this pattern together took too long.
        """
        began = time.monotonic()
        try:
            return self._compiled.match(name, timeout=max(0.001, self._left)) is not None
        except TimeoutError:
            raise self._refused(f"takes more than {SECONDS:g} seconds to match") from None
        finally:
            self._left -= time.monotonic() - began

    def _refused(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"the config's pattern {shorten(self._text)} {problem}. Write it more simply, or fetch the config again.",
            code="bad-pattern",
        )

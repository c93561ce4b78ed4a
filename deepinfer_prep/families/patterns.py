"""Patterns that names of tensors and modules are matched with, none of which can take long, whoever wrote them.

In the project's own patterns `*` stands for any characters, dots included, and every other character for itself. Those
of a checkpoint's config are shell-style patterns or regular expressions, and all of one config share a time limit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, Generic, TypeVar

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.files.untrusted import shorten

SECONDS = 10.0
"""Time for all matches with the patterns of one config; patterns of sound form need milliseconds."""
_LONGEST = 10_000
_MARKS = frozenset("*?[")
_TOO_LONG = f"takes, with the others, more than {SECONDS:g} seconds to match"

Entry = TypeVar("Entry")


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


class PatternClock:
    """The time that is left for the patterns of one config."""

    def __init__(self) -> None:
        self.left = SECONDS


class ForeignPattern:
    """A regular expression of a config, matched from the start of a name as compressed-tensors does.

    Args:
        pattern: the expression.
        clock: is shared by all patterns of a config, so that many of them take no longer than one may.
        shown: how the config writes it, where it is not an expression there.

    Raises:
        ValueError: it is no regular expression.
        CheckpointError: it is too long or too deep to be compiled.
    """

    def __init__(self, pattern: str, clock: PatternClock, shown: str = "") -> None:
        # Imported here, as few checkpoints have such patterns and importing it takes as long as all the rest.
        import regex  # type: ignore[import-untyped,unused-ignore]

        self._text, self._clock = shown or pattern, clock
        if len(pattern) > _LONGEST:
            raise _refused(self._text, f"is longer than {_LONGEST:,} characters")
        try:
            self._compiled: Any = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(str(error)) from None
        except (OverflowError, RecursionError, MemoryError) as error:
            raise _refused(self._text, f"cannot be compiled ({type(error).__name__})") from None

    def match(self, name: str) -> bool:
        """Whether a name begins with what the pattern describes.

        Raises:
            CheckpointError: all matches of the config's patterns together took too long.
        """
        began = time.monotonic()
        try:
            return self._compiled.match(name, timeout=max(0.001, self._clock.left)) is not None
        except TimeoutError:
            raise _refused(self._text, _TOO_LONG) from None
        finally:
            self._clock.left -= time.monotonic() - began


class _StarPattern:
    """A shell-style pattern that has no marks but `*`, as nearly all have: matched without an expression."""

    def __init__(self, text: str, clock: PatternClock) -> None:
        self._text, self._clock, self._pattern = text, clock, compile_pattern(text)

    def match(self, name: str) -> bool:
        began = time.monotonic()
        found = self._pattern.fullmatch(name) is not None
        self._clock.left -= time.monotonic() - began
        if self._clock.left < 0:
            raise _refused(self._text, _TOO_LONG)
        return found


class ModuleTable(Generic[Entry]):
    """What a config says of modules, under keys that name them themselves or by shell-style patterns (fnmatch).

    A key without `*`, `?` and `[` is looked up and not tried, so that a key for each of many modules takes no longer
    than one for all.

    Raises:
        CheckpointError: a pattern is too long to be compiled.
    """

    def __init__(self, entries: Mapping[str, Entry], clock: PatternClock) -> None:
        self._entries = tuple(entries.values())
        self._places = {key: place for place, key in enumerate(entries)}
        self._patterns = tuple(
            (place, _shell_pattern(key, clock)) for key, place in self._places.items() if _MARKS & set(key)
        )

    def find(self, module: str) -> Entry | None:
        """What the first key that names a module says of it; None where none does.

        Raises:
            CheckpointError: matching took too long.
        """
        own = self._places.get(module, len(self._entries))
        for place, pattern in self._patterns:
            if own < place:
                break
            if pattern.match(module):
                return self._entries[place]
        return self._entries[own] if own < len(self._entries) else None


def _shell_pattern(text: str, clock: PatternClock) -> ForeignPattern | _StarPattern:
    if _MARKS & set(text) == {"*"}:
        return _StarPattern(text, clock)
    return ForeignPattern(translate(text), clock, shown=text)


def _refused(pattern: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the config's pattern {shorten(pattern)} {problem}. Write it more simply, or fetch the config again.",
        code="bad-pattern",
    )

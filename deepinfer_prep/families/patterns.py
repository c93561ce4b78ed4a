"""Patterns for tensor names: `*` stands for any characters, dots included; every other character for itself."""

from __future__ import annotations

import re


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression for `fullmatch`; each `*` is a group that takes as much as it can."""
    return re.compile("(.*)".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)


def fill_pattern(pattern: str, matched: tuple[str, ...]) -> str:
    """A pattern with its first `*` replaced by the first matched text, its second by the second, and so on."""
    head, *parts = pattern.split("*")
    return head + "".join(text + part for text, part in zip(matched, parts, strict=False))

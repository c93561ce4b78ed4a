"""Text that others wrote, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text that may hold names of files and tensors, on one line and without what a terminal acts upon.

    Control and escape characters, line ends, and characters that change the direction of writing are escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode()
        for character in text
    )

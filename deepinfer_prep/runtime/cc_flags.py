"""NEURON_CC_FLAGS as text: pure functions that read it the way its two launchers do and add one option.

One launcher splits the variable on whitespace and takes quotes literally, another splits it by shell
quoting. Text that is to mean the same to both holds no quote, no backslash and no whitespace inside a word.
The compiler's parser takes the right-most occurrence of an option and drops the others.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from deepinfer_prep.errors import PrepError

KEY = "--internal-hlo2tensorizer-options"
"""The compiler option whose value carries options of the pass that reads HLO."""
FP8_OPTION = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
"""Reads e4m3fn operands as e4m3, without a range check. Unknown at top level: it must stand inside `KEY`."""

_SHELL_WHITESPACE = " \t\r\n"
_WORD = re.compile(r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^ \t\r\n'"\\])+""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MergedFlags:
    """A new value of NEURON_CC_FLAGS, and whole sentences about what the user should know of it."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Word:
    raw: str
    """As it stands in the variable, quotes included."""
    text: str
    """What the shell rules make of it."""


@dataclass(frozen=True, slots=True)
class _Split:
    others: tuple[_Word, ...]
    """Every other word, untouched, but for `FP8_OPTION` at top level, where the compiler refuses it."""
    values: tuple[str, ...]
    """The values of all occurrences of `KEY`, in order."""


def add_fp8_option(flags: str) -> MergedFlags:
    """Put `FP8_OPTION` inside the one value of `KEY` that counts and leave every other word as it stands.

    Applying it to its own result changes nothing.

    Args:
        flags: what NEURON_CC_FLAGS holds, quoted in any way; empty if it is unset.

    Raises:
        PrepError: a quote or a backslash is not closed, so that the shell rules cannot read `flags`.
    """
    split = _take_key(_words(flags))
    notes = []
    if len(split.values) > 1:
        dropped = " and ".join(repr(value) for value in split.values[:-1])
        notes.append(
            f"NEURON_CC_FLAGS holds {KEY} {len(split.values)} times. The compiler takes the right-most one, so "
            f"{dropped} had no effect and was removed; give all of its options in one value."
        )
    value = _with_option(split.values[-1] if split.values else "")
    word = f"{KEY}={value}"
    if not _is_plain(word):
        word = f"{KEY}={shlex.quote(value)}"
        notes.append(_quoted_note(value))
    return MergedFlags(" ".join([*(other.raw for other in split.others), word]), tuple(notes))


def option_value(flags: str, key: str) -> str | None:
    """The value of the right-most `key value` or `key=value` by the shell rules; None if there is none.

    Raises:
        PrepError: a quote or a backslash is not closed.
    """
    found, words = None, _words(flags)
    for position, word in enumerate(words):
        if word.text == key:
            found = words[position + 1].text if position + 1 < len(words) else ""
        elif word.text.startswith(key + "="):
            found = word.text[len(key) + 1 :]
    return found


def holds_fp8_option(flags: str) -> bool:
    """Whether `FP8_OPTION` stands anywhere in `flags`, in its place or not.

    Raises:
        PrepError: a quote or a backslash is not closed.
    """
    return any(_is_fp8_option(part) for word in _words(flags) for part in re.split(r"[\s=]", word.text))


def _words(flags: str) -> list[_Word]:
    words, position = [], 0
    while position < len(flags):
        if flags[position] in _SHELL_WHITESPACE:
            position += 1
            continue
        match = _WORD.match(flags, position)
        if match is None:
            raise PrepError(
                f"NEURON_CC_FLAGS has a quote or a backslash at character {position + 1} that is not closed: "
                f"{flags!r}. Close or remove it; the compiler's launchers cannot agree on such a value."
            )
        words.append(_Word(match[0], shlex.split(match[0])[0]))
        position = match.end()
    return words


def _take_key(words: list[_Word]) -> _Split:
    others, values = [], []
    rest = iter(words)
    for word in rest:
        if word.text == KEY:
            values.append(next(rest, _Word("", "")).text)
        elif word.text.startswith(KEY + "="):
            values.append(word.text[len(KEY) + 1 :])
        elif not _is_fp8_option(word.text):
            others.append(word)
    return _Split(tuple(others), tuple(values))


def _with_option(value: str) -> str:
    options = value.strip()
    if any(_is_fp8_option(option) for option in options.split()):
        return options
    return f"{options} {FP8_OPTION}".strip()


def _is_fp8_option(option: str) -> bool:
    # The pass takes its options with one dash or two, and with a value.
    return option.lstrip("-").partition("=")[0] == FP8_OPTION.lstrip("-")


def _is_plain(word: str) -> bool:
    return not re.search(r"[\s'\"\\]", word)


def _quoted_note(value: str) -> str:
    return (
        f"NEURON_CC_FLAGS now holds {KEY} with several options in one quoted value ({value!r}). Launchers that split "
        "by shell quoting (torch-xla, NxD Inference) read it rightly; TorchNeuron's launcher splits on whitespace "
        f"and will stop with NCC_EARG002. If you use that one, remove every option but {FP8_OPTION} from the value."
    )

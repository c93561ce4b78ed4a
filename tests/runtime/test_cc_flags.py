"""NEURON_CC_FLAGS read by both launchers' rules, with argparse's right-most-wins, before and after."""

from __future__ import annotations

import argparse
import shlex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepinfer_prep.errors import PrepError
from deepinfer_prep.runtime.cc_flags import FP8_OPTION, KEY, add_fp8_option, holds_fp8_option, option_value

CANONICAL = f"{KEY}={FP8_OPTION}"


def by_shell(flags: str) -> list[str]:
    return shlex.split(flags)


def by_whitespace(flags: str) -> list[str]:
    return flags.split()


LAUNCHERS = pytest.mark.parametrize("launcher", [by_shell, by_whitespace])


def effective(words: list[str]) -> str:
    """The value of KEY that an argparse parser, as the compiler has one, ends up with."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument(KEY, dest="value", default="")
    return str(parser.parse_known_args(words)[0].value)


def test_the_option_is_the_one_that_the_compiler_knows() -> None:
    expected = "--internal-hlo2tensorizer-options=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
    assert add_fp8_option("").text == expected


@LAUNCHERS
@pytest.mark.parametrize(
    ("prior", "kept"),
    [
        ("", []),
        ("  \t\n", []),
        ("--lnc=2", ["--lnc=2"]),
        ("--lnc=2 -O1 --auto-cast=none", ["--lnc=2", "-O1", "--auto-cast=none"]),
        ("--target trn2\n-O1", ["--target", "trn2", "-O1"]),
        (f"{KEY}={FP8_OPTION}", []),
        (f"{KEY}='{FP8_OPTION}' -O1", ["-O1"]),
        (f'"{KEY}"={FP8_OPTION}', []),
        (f"'{KEY}={FP8_OPTION}'", []),
        (f"{KEY} {FP8_OPTION} --lnc=2", ["--lnc=2"]),
        (f"{KEY}=", []),
        (f"{KEY}='' -O2", ["-O2"]),
        (KEY, []),
        (FP8_OPTION, []),
        (f"-O1 {FP8_OPTION} --lnc=2", ["-O1", "--lnc=2"]),
        (f"{KEY}=--verify-hlo=true {KEY}={FP8_OPTION}", []),
        (f"{KEY}='--a --b' --lnc=2 {KEY}={FP8_OPTION}", ["--lnc=2"]),
        (f"--lnc=2 {KEY}={FP8_OPTION} -O1 {KEY}={FP8_OPTION}", ["--lnc=2", "-O1"]),
    ],
)
def test_one_option_reads_alike_for_both_launchers(prior, kept, launcher):
    merged = add_fp8_option(prior)
    words = launcher(merged.text)
    assert words == [*kept, CANONICAL]
    assert effective(words) == FP8_OPTION


@pytest.mark.parametrize(
    ("prior", "options", "kept"),
    [
        (f"{KEY}=--verify-hlo=true", ["--verify-hlo=true"], []),
        (f"{KEY}=--verify-hlo=true -O1", ["--verify-hlo=true"], ["-O1"]),
        (f"{KEY}='--verify-hlo=true' -O1", ["--verify-hlo=true"], ["-O1"]),
        (f'{KEY}="--verify-hlo=true" -O1', ["--verify-hlo=true"], ["-O1"]),
        (f"{KEY} --verify-hlo=true", ["--verify-hlo=true"], []),
        (f"{KEY} '--a=1 --b' --lnc=2", ["--a=1", "--b"], ["--lnc=2"]),
        (f"{KEY}='--a=10 --verify-hlo=true' --lnc=2", ["--a=10", "--verify-hlo=true"], ["--lnc=2"]),
        (f'--lnc=2 {KEY}="--a=10 --verify-hlo=true"', ["--a=10", "--verify-hlo=true"], ["--lnc=2"]),
        (f"'{KEY}=--a --b' -O1", ["--a", "--b"], ["-O1"]),
        (f"{KEY}=--a\\ --b", ["--a", "--b"], []),
        (f"{KEY}=' --a=10  --b'", ["--a=10", "--b"], []),
        (f"{KEY}=--first {KEY}='--second --third'", ["--second", "--third"], []),
        (f"{KEY}='--a {FP8_OPTION} --b'", ["--a", "--b"], []),
        (f"-O1 {FP8_OPTION} {KEY}=--a", ["--a"], ["-O1"]),
        (f"--tensorizer-options='--x --y' {KEY}='--a'", ["--a"], ["--tensorizer-options=--x --y"]),
    ],
)
def test_shell_launcher_keeps_the_options_that_were_in_force(prior, options, kept):
    merged = add_fp8_option(prior)
    words = by_shell(merged.text)
    assert words[:-1] == kept
    assert sorted(effective(words).split()) == sorted([*options, FP8_OPTION])
    # Several options need a space, which the whitespace launcher cannot carry: never without a word about it.
    assert any("NCC_EARG002" in note for note in merged.notes)


def test_options_of_an_overridden_occurrence_are_reported():
    merged = add_fp8_option(f"{KEY}=--lost {KEY}={FP8_OPTION}")
    assert merged.text == CANONICAL
    assert len(merged.notes) == 1
    assert "'--lost' had no effect" in merged.notes[0]


@pytest.mark.parametrize("option", [f"{FP8_OPTION}=true", FP8_OPTION[1:], f"{FP8_OPTION}=false"])
def test_option_in_another_spelling_is_the_users_choice(option):
    assert add_fp8_option(f"{KEY}={option}").text == f"{KEY}={option}"


@pytest.mark.parametrize("prior", ["--a='x", 'say "', "trailing\\", "it's"])
def test_unclosed_quotes_are_refused_with_their_place(prior):
    with pytest.raises(PrepError, match="NEURON_CC_FLAGS has a quote or a backslash at character"):
        add_fp8_option(prior)


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("", None),
        ("--target=trn3", "trn3"),
        ("--target trn1 -O1 --target='trn2'", "trn2"),
        ("--target", ""),
        ("--targets=trn3 '--target' \"trn2\"", "trn2"),
    ],
)
def test_option_value(flags, value):
    assert option_value(flags, "--target") == value


@pytest.mark.parametrize(
    ("flags", "held"),
    [("", False), (CANONICAL, True), (f"{KEY}='--a {FP8_OPTION}=true'", True), (FP8_OPTION, True), ("--lnc=2", False)],
)
def test_holds_fp8_option(flags, held):
    assert holds_fp8_option(flags) is held


# Properties

PLAIN = st.text("abcXYZ019_=.,:/-", min_size=1, max_size=12).map(lambda text: "--" + text)
INNER = st.lists(st.one_of(PLAIN, st.just(FP8_OPTION)), max_size=3).map(" ".join)


@st.composite
def quoted(draw: st.DrawFn, text: str) -> str:
    """One spelling of a word that the shell rules read as `text`."""
    style = draw(st.sampled_from(["shlex", "single", "double", "escaped", "mixed"]))
    if style == "double":
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if style == "escaped":
        return "".join(
            character if character.isalnum() or character in "-=_" else "\\" + character for character in text
        )
    cut = draw(st.integers(0, len(text)))
    parts = [text[:cut], text[cut:]] if style == "mixed" else [text]
    return "".join(f"'{part}'" if style == "single" else shlex.quote(part) for part in parts)


@st.composite
def key_words(draw: st.DrawFn) -> str:
    value = draw(INNER)
    joined = draw(st.sampled_from(["equals", "whole", "apart"]))
    if joined == "whole":
        return draw(quoted(f"{KEY}={value}"))
    return f"{KEY}{'=' if joined == 'equals' else ' '}{draw(quoted(value))}"


SPACE = st.sampled_from([" ", "  ", "\t", "\n", " \r\n"])
WORDS = st.one_of(
    PLAIN, PLAIN.flatmap(quoted), PLAIN.map(lambda text: shlex.quote(f"{text} x")), key_words(), st.just(FP8_OPTION)
)


@st.composite
def priors(draw: st.DrawFn) -> str:
    return "".join(draw(SPACE) + word for word in draw(st.lists(WORDS, max_size=5)))


def told_apart(words: list[str]) -> tuple[list[str], list[str]]:
    """The options in force inside KEY, given in any form, and every word that has nothing to do with it."""
    value, kept, iterator = "", [], iter(words)
    for word in iterator:
        if word == KEY:
            value = next(iterator, "")
        elif word.startswith(KEY + "="):
            value = word[len(KEY) + 1 :]
        elif word != FP8_OPTION:
            kept.append(word)
    return [option for option in value.split() if option != FP8_OPTION], kept


@given(priors())
@example(f"{KEY}='--verify-hlo=true' -O1")
def test_any_prior_value(prior):
    merged = add_fp8_option(prior)
    words = by_shell(merged.text)
    value = effective(words)
    assert FP8_OPTION in value.split()
    assert told_apart(words) == told_apart(by_shell(prior))
    assert sum(word.startswith(KEY) for word in words) == 1
    assert add_fp8_option(merged.text).text == merged.text
    noted = any("NCC_EARG002" in note for note in merged.notes)
    assert noted == (len(value.split()) > 1)
    if not noted:
        assert effective(by_whitespace(merged.text)) == FP8_OPTION
        assert by_whitespace(merged.text)[-1] == CANONICAL


@given(st.text(max_size=40))
def test_any_text_is_merged_or_refused(prior):
    try:
        by_shell(prior)
    except ValueError:
        with pytest.raises(PrepError):
            add_fp8_option(prior)
        return
    merged = add_fp8_option(prior)
    assert effective(by_shell(merged.text)) == FP8_OPTION
    assert effective(by_whitespace(merged.text)) == FP8_OPTION
    assert by_shell(merged.text)[:-1] == by_shell(prior)
    assert by_whitespace(merged.text)[:-1] == by_whitespace(prior)

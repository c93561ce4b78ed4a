"""Patterns give what a regular expression would, and take no longer however they are made."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.families import patterns
from deepinfer_prep.families.patterns import ForeignPattern, ModuleTable, PatternClock, compile_pattern
from deepinfer_prep.planning.split import _is_candidate
from tests.raises import raises_code


@given(st.text("ab*", max_size=8), st.text("ab", max_size=12))
def test_stars_take_what_a_greedy_regular_expression_takes(pattern: str, name: str) -> None:
    expected = re.compile("(.*)".join(map(re.escape, pattern.split("*"))), re.DOTALL).fullmatch(name)
    found = compile_pattern(pattern).fullmatch(name)
    assert (found.groups() if found else None) == (expected.groups() if expected else None)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*a" * 30 + "b", "a" * 100_000),
        ("*" * 1000 + "b", "a" * 100_000),
        ("*" + "b" + "a" * 50_000 + "*", "a" * 100_000),
        ("*" + "a" * 50_000 + "b*", "a" * 100_000),
        ("*ab" * 500, "ab" * 50_000 + "c"),
    ],
    ids=["many stars", "stars alone", "a long end", "a long beginning", "pairs"],
)
def test_no_pattern_of_names_takes_long(pattern: str, name: str) -> None:
    began = time.process_time()
    assert compile_pattern(pattern).fullmatch(name) is None
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", ["hc" * 16_000 + "x", "hc." * 16_000 + "x", "hc" * 16_000 + "fn.x", "hyper" * 20_000])
def test_no_name_makes_the_look_for_matrices_to_split_take_long(name: str) -> None:
    began = time.process_time()
    assert not _is_candidate(name)
    assert time.process_time() - began < 0.5


_CANDIDATE = re.compile(r"hc[^.]*(\.[^.]*)?fn(\.weight)?\Z|hyper_?connection")


@given(
    st.lists(st.sampled_from(["hc", "fn", ".", "x", ".weight", "hyper_connection", "hyper", "connection"]), max_size=7)
)
def test_names_of_matrices_to_split_are_those_of_the_rule(parts: list[str]) -> None:
    name = "".join(parts)
    assert _is_candidate(name) == bool(_CANDIDATE.search(name)), name


@pytest.mark.parametrize("pattern", [r"model\.(a+)+\d$", r"(a|aa)+$", r"(.*a){25}$", r"(?:a*)*b"])
def test_a_pattern_of_a_config_that_takes_long_is_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.3)
    name = "model." + "a" * 40 + "!" if pattern.startswith("model") else "a" * 60 + "!"
    began = time.monotonic()
    with suppress(CheckpointError):
        compiled = ForeignPattern(pattern, PatternClock())
        assert not any(compiled.match(name) for _ in range(100))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("pattern", ["a" * 20_000, "(" * 5_000 + ")" * 5_000, "a{99999999999999999999}"])
def test_a_pattern_of_a_config_that_cannot_be_compiled_is_a_sentence(pattern: str) -> None:
    with suppress(CheckpointError, ValueError):
        ForeignPattern(pattern, PatternClock())


def test_a_long_pattern_is_refused() -> None:
    with raises_code("bad-pattern"):
        ForeignPattern("a" * 20_000, PatternClock())


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (r".*mlp\..*_proj$", "model.layers.0.mlp.up_proj", True),
        (r"^(?!.*lm_head).*$", "lm_head", False),
        (r"^(?!.*lm_head).*$", "model.layers.0", True),
        (r"model\.layers\.[0-9]+", "model.layers.12.x", True),
        (r"layers", "model.layers", False),
    ],
)
def test_patterns_of_configs_mean_what_they_mean_to_python(pattern: str, name: str, matches: bool) -> None:
    assert ForeignPattern(pattern, PatternClock()).match(name) == matches == bool(re.match(pattern, name))


def test_many_patterns_of_a_config_take_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.3)
    clock = PatternClock()
    began = time.monotonic()
    with raises_code("bad-pattern"):
        for number in range(1000):
            ForeignPattern(rf"({number}|a|aa)+$", clock).match("a" * 60 + "!")
    assert time.monotonic() - began < 5


_KEYS = st.lists(st.text("ab*?[].!-", max_size=5), max_size=5, unique=True)


@given(_KEYS, st.text("ab.-[", max_size=6))
def test_the_first_key_that_names_a_module_is_heard(keys: list[str], module: str) -> None:
    expected = next((key for key in keys if key == module or fnmatchcase(module, key)), None)
    assert ModuleTable({key: key for key in keys}, PatternClock()).find(module) == expected


def test_a_key_for_each_of_many_modules_takes_no_longer_than_one() -> None:
    names = [f"model.layers.{number}.mlp" for number in range(100_000)]
    table = ModuleTable(dict.fromkeys(names, 1), PatternClock())
    began = time.process_time()
    assert all(table.find(name) for name in names)
    assert time.process_time() - began < 1


def test_a_config_of_very_many_patterns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.3)
    table = ModuleTable({f"*{number}*x": 1 for number in range(20_000)}, PatternClock())
    began = time.monotonic()
    with raises_code("bad-pattern"):
        for number in range(1_000_000):
            table.find(f"model.layers.{number}.mlp")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("key", ["?" * 20_000, "[a-" + "b" * 20_000])
def test_a_key_that_is_too_long_for_a_pattern_is_refused(key: str) -> None:
    with raises_code("bad-pattern"):
        ModuleTable({key: 1}, PatternClock())

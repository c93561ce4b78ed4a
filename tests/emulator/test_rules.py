"""Every rule is broken at least once, and the emulator refuses, naming rule, operation, operand and line."""

from __future__ import annotations

import numpy as np
import pytest
from nki_emulator import RuleError, rules
from nki_emulator.errors import Rule

from tests.emulator.broken_rules import CASES, Case, instructions, loops, matmul, memory, names, programs, values, views
from tests.emulator.support import execute, load, store

MODULES = (instructions, loops, matmul, memory, names, programs, values, views)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule.name}-{case.name}")
def test_broken_rule_is_refused(case: Case) -> None:
    with pytest.raises(RuleError) as caught:
        case.launch()
    error = caught.value
    assert (error.rule.name, error.op, error.operand) == (case.rule.name, case.op, case.operand), str(error)
    assert any(error.location.startswith(f"{module.__file__}:") for module in MODULES) or "support" in error.location
    for part in (error.rule.statement, error.rule.source, error.found, error.location):
        assert part
        assert part in str(error)


def test_every_rule_is_broken_by_some_case() -> None:
    assert {case.rule.name for case in CASES} == set(rules.ALL)


def test_rules_have_distinct_names() -> None:
    declared = [value for value in vars(rules).values() if isinstance(value, Rule)]
    assert len(declared) == len(rules.ALL)


def test_sources_name_a_page_or_say_that_the_rule_is_ours() -> None:
    for rule in rules.ALL.values():
        assert rule.source.startswith(("aws-neuron-sdk docs: nki/", "aws-neuron-sdk docs: compiler/", "emulator: "))


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_a_refused_launch_leaves_no_program_running(case: Case) -> None:
    with pytest.raises(RuleError):
        case.launch()
    ones = np.ones((4, 4), np.float32)
    np.testing.assert_array_equal(execute(lambda a: store(load(a)), ones).output, ones)

"""Random programs: compiled and eager agree bit for bit on every result and every input, or it is refused.

DEEPINFER_BACKEND_PROGRAMS=2000 sets how many are tried; with `pytest -s` the outcome is printed.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import fuzz_backend
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import BackendCompilerFailed

from deepinfer_prep.errors import LegalizationError
from deepinfer_prep.runtime.backend import byte_formats
from deepinfer_prep.runtime.backend.byte_formats import E4M3FN
from deepinfer_prep.runtime.backend.codecs import decode_e4m3fn, encode_e4m3fn
from tests.runtime.backend.harness import assert_same
from tests.runtime.backend.programs import FP8, STATEMENTS, WORLDS, Draw, Program, grow

COUNT = int(os.environ.get("DEEPINFER_BACKEND_PROGRAMS", "20"))

statement = st.tuples(st.integers(0, len(STATEMENTS) - 1), st.integers(0, 11), st.integers(0, 11), st.integers(0, 8))


def outcome(draws: list[Draw]) -> str:
    """How a program ends: equal, or refused with the reason."""
    torch._dynamo.reset()
    program = grow(draws)
    function = program.function()
    eager_args, compiled_args = program.arguments(), program.arguments()
    expected = function(**eager_args)
    try:
        actual = torch.compile(function, backend="deepinfer_neuron")(**compiled_args)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, LegalizationError):
            return f"refused: {error.inner_exception}".splitlines()[0]
        raise
    try:
        assert_same(expected, actual)
        assert_same(eager_args, compiled_args)
    except AssertionError as error:
        raise AssertionError(f"{program.source}\n{error}") from error
    return "equal"


@pytest.mark.timeout(36000)
def test_random_programs() -> None:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=COUNT,
        deadline=None,
        derandomize="DEEPINFER_BACKEND_PROGRAMS" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(statement, min_size=2, max_size=14))
    def try_program(draws: list[Draw]) -> None:
        found = outcome(draws)
        outcomes[found] += 1
        # Only writes into what overlaps in memory, as expanded tensors do, may be refused.
        assert found == "equal" or "elements overlap in memory" in found, found

    try_program()
    print(f"{sum(outcomes.values())} random programs: {dict(outcomes.most_common())}")
    assert outcomes["equal"] >= 0.9 * COUNT


def test_every_statement_occurs() -> None:
    """Each on its own, so that none is dead weight: it compiles to what eager computes."""
    for start in range(0, len(STATEMENTS), 12):
        # The operands are those of the inputs that most statements accept.
        draws = [(kind, 1, 1, 1) for kind in range(start, min(start + 12, len(STATEMENTS)))]
        assert outcome(draws) == "equal"
    accepted = sum(len(grow([(kind, 1, 1, 1)]).lines) for kind in range(len(STATEMENTS)))
    assert accepted >= 0.75 * len(STATEMENTS)


@pytest.mark.parametrize("way", [fuzz_backend.on_plain_values, fuzz_backend.on_fake_values])
def test_the_fuzzer_sees_what_torch_compile_gives(way: fuzz_backend.Compiler) -> None:
    """Every statement, over every kind of arguments, on the ways that leave out Dynamo."""
    for world in WORLDS:
        for start in range(0, len(STATEMENTS), 8):
            draws = [(kind, 1, 1, 1) for kind in range(start, min(start + 8, len(STATEMENTS)))]
            assert fuzz_backend.outcome(grow(draws, world), way) == "equal"


@pytest.mark.parametrize("world", ["ordinary", "every code"])
def test_the_fuzzer_stops_at_a_difference(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    wrong = replace(E4M3FN, encode=lambda values: encode_e4m3fn(values * 1.1))
    monkeypatch.setitem(byte_formats.CARRIED, E4M3FN.dtype, wrong)
    program = Program(world, lines=["v0 = floats.to(torch.float8_e4m3fn)"], kinds={"v0": FP8})
    for way in (fuzz_backend.on_plain_values, fuzz_backend.on_fake_values):
        with pytest.raises(AssertionError, match=r"v0 = floats.to"):
            fuzz_backend.outcome(program, way)


def test_the_fuzzer_counts_signs_of_nan_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that forgets the sign of NaN differs where a program takes the byte for a number."""

    def without_sign(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return decode_e4m3fn(torch.where(codes == 0xFF, 0x7F, codes), dtype)

    monkeypatch.setitem(byte_formats.CARRIED, E4M3FN.dtype, replace(E4M3FN, decode=without_sign))
    lines = ["v0 = whole.float()", "whole.copy_(v0)", "raw.add_(1)"]
    program = Program("every code", lines=lines, kinds={"v0": "f"})
    assert fuzz_backend.outcome(program, fuzz_backend.on_plain_values) == "equal but for the signs of NaN"


@pytest.mark.parametrize("mask", ["one > 0", "(whole == whole).any()"])
def test_the_fuzzer_counts_what_torch_cannot_trace_on_fake_tensors_as_refused(mask: str) -> None:
    """Indexing by a mask without axes asks for its value; the other ways have one, or break the graph."""
    program = Program(lines=[f"v0 = {mask}", "v1 = floats.clone()", "v1[v0] = 2.0"], kinds={"v1": "f"})
    refused = "refused: torch does not trace aten._local_scalar_dense.default on fake tensors"
    assert fuzz_backend.outcome(program, fuzz_backend.on_fake_values) == refused
    assert fuzz_backend.outcome(program, fuzz_backend.on_plain_values) == "equal"
    assert fuzz_backend.outcome(program, fuzz_backend.as_a_user) == "equal"

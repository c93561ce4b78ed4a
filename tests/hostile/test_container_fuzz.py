"""The container reader on files made to confuse it, judged by the safetensors library."""

from __future__ import annotations

import json
import math
from collections import Counter
from random import Random

import pytest
from container_fuzz.files import make_file
from container_fuzz.judge import STATED_REASONS, DisagreementError, judge
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_prep.files import container


def judge_many(choices: Random, count: int) -> Counter[str]:
    return Counter(judge(make_file(choices)) for _ in range(count))


@settings(max_examples=500, deadline=None)
@given(st.randoms(use_true_random=False))
def test_mutated_files_are_read_as_the_library_reads_them(choices: Random) -> None:
    judge(make_file(choices))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_the_library_reads_them(content: bytes) -> None:
    judge(content)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30), st.lists(st.integers(-1, 2**65), max_size=4), st.booleans())
def test_any_name_metadata_and_shape(name: str, value: str, shape: list[int], escaped: bool) -> None:
    header = {name: {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}, "__metadata__": {value: name}}
    text = json.dumps(header, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    judge(len(text).to_bytes(8, "little") + text)


def test_the_generator_reaches_every_verdict() -> None:
    """Else the tests above would prove little."""
    verdicts = judge_many(Random(3), 10_000)
    assert verdicts.keys() == {"accepted", "rejected", *STATED_REASONS}
    assert verdicts["accepted"] > 500


@pytest.mark.parametrize(
    ("name", "careless"),
    [
        ("_are_sizes", lambda numbers: True),
        ("_parse_number", int),
        ("_checked_bits", lambda shape, bits: math.prod(shape) * bits),
        ("_is_text", lambda text: True),
        ("_check_tiling", lambda *arguments: None),
        ("MAX_HEADER_BYTES", 10),
        ("DTYPES", {**container.DTYPES, "F8": 8}),
    ],
)
def test_a_careless_reader_is_found_out(name: str, careless: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule that is dropped shows up within a few thousand files."""
    monkeypatch.setattr(container, name, careless)
    with pytest.raises(DisagreementError):
        judge_many(Random(1), 60_000)

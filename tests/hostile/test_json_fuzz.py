"""A short run of the fuzzer of manifests, journals, indexes and configs, and that it can find something."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from json_fuzz.mutations import mutate
from json_fuzz.outcomes import MANIFEST, FindError, Subject, opened, run

from deepinfer_prep import manifest, verify


def try_many(subject: Subject, chance: random.Random, count: int) -> None:
    for _ in range(count):
        subject.try_one(MANIFEST, chance)


def test_every_mutation_ends_in_a_sentence_or_a_right_result(scratch: Path) -> None:
    outcomes = run(scratch, 120, seed=5)
    assert outcomes.total() == 120
    assert any("sentence" in outcome for outcome in outcomes)


def test_a_traceback_would_be_found(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_count", lambda value, where: value)
    subject, chance = Subject(scratch), random.Random(3)
    with pytest.raises(FindError):
        try_many(subject, chance, 400)


def test_a_file_that_is_opened_elsewhere_would_be_found(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    subject = Subject(scratch)
    read = verify.read_manifest

    def peeks(folder: Path) -> object:
        secret.read_text()
        return read(folder)

    monkeypatch.setattr(verify, "read_manifest", peeks)
    with pytest.raises(FindError, match="opened"):
        try_many(subject, random.Random(0), 20)
    assert opened().outside


def test_mutations_differ_and_repeat_with_their_seed() -> None:
    text = b'{"a": {"b": [1, 2, 3]}, "c": "d"}'
    many = [mutate(text, random.Random(seed)) for seed in range(200)]
    assert many == [mutate(text, random.Random(seed)) for seed in range(200)]
    assert len(set(many)) > 100

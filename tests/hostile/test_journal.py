"""Journals as kills, power cuts and other versions leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_prep.files.folders import Folder
from deepinfer_prep.fp8 import CodeCounts
from deepinfer_prep.writing.journal import Journal, SegmentDone, is_same_run, read_done, read_identity
from deepinfer_prep.writing.output_bytes import Tally

IDENTITY = {"tool": "1", "files": [["a", 1, 2]], "options": {"split": ("x", "y")}}


def segment(number: int) -> SegmentDone:
    return SegmentDone("a\n\U0001f9ee", number, f"{number:032x}", Tally(CodeCounts(number, 1, 2), {"t": 1}))


def write(path: Path, count: int) -> bytes:
    journal = Journal(Folder.open(path.parent), IDENTITY)
    journal.record(segment(number) for number in range(count))
    journal.close()
    return path.read_bytes()


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read_identity(Folder.open(path.parent)) is None
    assert read_done(Folder.open(path.parent)) == {}
    write(path, 3)
    assert is_same_run(read_identity(Folder.open(path.parent)), IDENTITY)
    assert read_done(Folder.open(path.parent)) == {("a\n\U0001f9ee", number): segment(number) for number in range(3)}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_journal_cut_or_overwritten_anywhere_goes_on_from_its_last_whole_entry(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    whole = write(path, 5)
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    torn = whole[:cut] + data.draw(st.sampled_from([b"", bytes(700), b"\n", b"}\n{", b"[1]\n", b"\xff\r\n"]))
    path.write_bytes(torn)
    same = [one == other for one, other in zip(torn.splitlines(True), whole.splitlines(True), strict=False)]
    intact = (*same, False).index(False)
    kept = read_done(Folder.open(path.parent))
    assert list(kept) == [("a\n\U0001f9ee", number) for number in range(intact - 1)]
    journal = Journal(Folder.open(path.parent), IDENTITY)
    journal.record([segment(9)])
    journal.close()
    assert path.read_bytes().count(b"\n") == max(intact, 1) + 1
    assert read_done(Folder.open(path.parent)) == {**kept, ("a\n\U0001f9ee", 9): segment(9)}
    assert is_same_run(read_identity(Folder.open(path.parent)), IDENTITY)


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b'{"file":"a","segment":"1","digest":"x","counts":[1,2,3],"nan":{}}',
        b'{"file":"a","segment":1,"digest":"x","counts":[1,2],"nan":{}}',
        b'{"file":"a","segment":1,"digest":"x","counts":[1,2,3]}',
        b"[" * 100_000,
    ],
)
def test_an_entry_of_another_form_ends_the_journal(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal"
    whole = write(path, 2)
    path.write_bytes(whole + line + b"\n" + whole.splitlines(keepends=True)[1])
    assert len(read_done(Folder.open(path.parent))) == 2


@pytest.mark.parametrize("change", ["format", "identity", "first line"])
def test_a_journal_of_another_run_begins_anew(tmp_path: Path, change: str) -> None:
    path = tmp_path / "journal"
    write(path, 2)
    lines = path.read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    first["format" if change == "format" else "tool"] = 99
    path.write_text("".join([json.dumps(first) + "\n" if change != "first line" else "{torn\n", *lines[1:]]))
    assert not is_same_run(read_identity(Folder.open(path.parent)), IDENTITY)
    Journal(Folder.open(path.parent), IDENTITY).close()
    assert is_same_run(read_identity(Folder.open(path.parent)), IDENTITY)
    assert read_done(Folder.open(path.parent)) == {}

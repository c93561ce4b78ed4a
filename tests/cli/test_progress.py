"""Progress in lines: how far, how fast, how long."""

from __future__ import annotations

import pytest

from deepinfer_prep.cli import console
from deepinfer_prep.workers import Progress


def test_lines_show_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console._PlainLines()
    for seconds, done in ((0, 0), (2, 1), (10, 10), (100, 100)):
        now[0] = float(seconds)
        lines(Progress("convert", done * 10**8, 100 * 10**8))
    assert capsys.readouterr().err.splitlines() == [
        "convert: 1 GB of 10 GB (10 %), 100 MB/s, 0:01:30 left",
        "convert: 10 GB of 10 GB (100 %), 100 MB/s",
    ]

"""The page as text: what stands in it, how large it is, and that no name in it acts."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep.report import build_report
from deepinfer_prep.report.page import visible
from tests.report.hostile import HOSTILE_NAMES
from tests.small_files import write_file

pytest.importorskip("plotly", reason="plotly (the extra `report`) is not installed")

from deepinfer_prep.report import render_page

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_of(page: str) -> Any:
    found = _DATA.search(page)
    assert found is not None
    return json.loads(found[1])


def test_the_page_says_the_verdict_and_names_no_address(sample: Path) -> None:
    report = build_report(sample)
    page = render_page(report)
    assert html.escape(report.verdict.sentence) in page
    own = page[: page.index('id="data"')]
    assert "http:" not in own
    assert "https:" not in own
    assert "default-src 'none'" in own
    assert "<script src" not in page
    assert "<link" not in own.replace('<link rel="icon" href="data:,">', "")


def test_every_tensor_and_cell_is_in_the_data(sample: Path) -> None:
    report = build_report(sample)
    data = data_of(render_page(report))
    assert [row[0] for row in data["tensors"]["rows"]] == [row.name for row in report.tensors]
    assert len(data["map"]["cells"]) == len(report.map.cells)
    assert len(data["distributions"]) == len(report.distributions)
    counts = data["distributions"][0][2]
    assert counts + [0] * (256 - len(counts)) == [*report.distributions[0].counts]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    tensors = dict.fromkeys(HOSTILE_NAMES, ("F8_E4M3", (32, 128), 126))
    write_file(tmp_path / "model.safetensors", tensors)
    report = build_report(tmp_path)
    page = render_page(report)
    # Three scripts of the page's own, and no tag, attribute or marker that a name brought along.
    assert page.count("</script") == 3
    assert "<img" not in page
    assert "<b>bold" not in page
    names = [row[0] for row in data_of(page)["tensors"]["rows"]]
    assert sorted(names) == sorted(map(visible, HOSTILE_NAMES))
    page.encode()
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x7f]", page[: page.index("plotly.js")])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0.w", "layers.0.w"),
        ("a\u202eb", "a\\u{202e}b"),
        ("a\nb\0", "a\\u{a}b\\u{0}"),
        ("\ud800", "\\u{d800}"),
        ("zero\u200bwidth", "zero\\u{200b}width"),
        ("schöne Gewichte 重み", "schöne Gewichte 重み"),
    ],
)
def test_hidden_characters_are_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_the_page_of_3000_weights_is_at_most_6_mb(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    every_code = bytes(range(127)) * 4 + bytes(4)
    for number in range(3000):
        name = f"model.layers.{number // 50}.mlp.experts.{number % 50}.down_proj"
        tensors[f"{name}.weight"] = ("F8_E4M3", (4, 128), every_code)
        tensors[f"{name}.weight_scale_inv"] = ("F32", (1, 1), bytes([0, 0, number % 128, 63]))
    write_file(tmp_path / "model.safetensors", tensors)
    page = render_page(build_report(tmp_path))
    assert len(data_of(page)["tensors"]["rows"]) == 3000
    assert len(page.encode()) <= 6_000_000

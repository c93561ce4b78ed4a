"""The command report: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deepinfer_prep.cli.main import main
from deepinfer_prep.report import page as page_module
from tests.small_files import SCALE, WEIGHT, write_file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_file(tmp_path / "source" / "model.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    return tmp_path / "source"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_a_page_is_written_and_the_verdict_printed(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly (the extra `report`) is not installed")
    result = run(checkpoint, "-o", tmp_path / "report.html")
    assert result.exit_code == 0
    assert result.stdout.startswith("This checkpoint can be converted.")
    assert "4,096 of its 4,096 fp8 codes" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_json_needs_no_page(checkpoint: Path) -> None:
    result = run(checkpoint, "--json", "--quiet")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["total"]["misread"] == 4096
    assert data["tensors"][0]["name"] == "l.weight"


def test_a_refused_checkpoint_is_shown_all_the_same(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT})
    result = run(tmp_path, "--json", "--headers-only")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["verdict"]["status"] == "refused"


def test_wrong_usage_exits_with_2(checkpoint: Path, tmp_path: Path) -> None:
    assert run(checkpoint).exit_code == 2
    result = run(checkpoint, "-o", checkpoint / "model.safetensors")
    assert result.exit_code == 2
    assert "does not end in .html" in result.stderr


def test_without_plotly_the_message_says_what_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "find_spec", lambda name: None)
    result = run(checkpoint, "-o", tmp_path / "report.html")
    assert result.exit_code == 1
    assert "pip install 'deepinfer-prep[report]'" in result.stderr

"""What is printed: names that mean something to a terminal, and streams that are closed, full or gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deepinfer_prep import convert_checkpoint
from deepinfer_prep.cli.main import main
from deepinfer_prep.cli.printable import printable
from tests.hostile.checkpoints import MANIFEST, write_checkpoint
from tests.small_files import ONE_F32, WEIGHT, Tensor, tree, write_file

NASTY = [
    "\x1b[2J\x1b[31mred",
    "\nverified: no difference\n",
    "a\rb",
    "\u202eabc",
    "\x9b31m",
    "\u2066x\u2069",
    "\x00",
    "\u2028x",
]


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("command", ["inspect", "convert", "refused", "--json"])
def test_names_of_tensors_reach_no_terminal_raw(tmp_path: Path, name: str, command: str) -> None:
    tensors: dict[str, Tensor] = {f"{name}.weight": WEIGHT}
    if command != "refused":
        tensors[f"{name}.weight_scale"] = ("F32", (1,), ONE_F32)
    tensors[f"{name}.hc_fn"] = ("F32", (2, 2), bytes(16))
    write_file(tmp_path / "source" / "model.safetensors", tensors)
    arguments = ["inspect" if command in ("inspect", "--json") else "convert", str(tmp_path / "source"), "--quiet"]
    arguments += [str(tmp_path / "out")] if arguments[0] == "convert" else []
    result = CliRunner().invoke(main, [*arguments, *(["--json"] if command == "--json" else [])])
    for character in set(name) - set("\n"):
        assert character.isprintable() or character not in result.output
    assert "\nverified" not in result.output
    if command == "--json":
        json.loads(result.stdout, parse_constant=lambda value: pytest.fail(value))


@pytest.mark.parametrize("name", NASTY)
def test_names_of_files_fake_no_line(tmp_path: Path, name: str) -> None:
    if "\0" in name:
        return
    source, output = write_checkpoint(tmp_path / "source"), tmp_path / "out"
    (source / f"x{name}.bin").write_text("x")
    runner = CliRunner()
    assert runner.invoke(main, ["convert", str(source), str(output), "--quiet"]).exit_code == 0
    (output / f"x{name}.bin").write_text("changed")
    result = runner.invoke(main, ["verify", str(output), "--quiet"])
    assert result.exit_code == 1
    assert "\nverified" not in result.output
    for character in set(name) - set("\n"):
        assert character.isprintable() or character not in result.output


@pytest.mark.parametrize(
    ("text", "shown"), [("a\nb", "a\\nb"), ("\u202e", "\\u202e"), ("\U0001f9ee \u4e2d", "\U0001f9ee \u4e2d")]
)
def test_what_is_printable_stays(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_many_warnings_are_cut_with_a_count(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    for number in range(100):
        (source / f"{number}.part").write_text("x")
    result = CliRunner().invoke(main, ["inspect", str(source), "--quiet"])
    assert 0 < result.stdout.count("warning: ") <= 31
    assert "more (`--json` lists all)" in result.stdout
    found = json.loads(CliRunner().invoke(main, ["inspect", str(source), "--json", "--quiet"]).stdout)
    assert len(found["warnings"]) >= 100


def run(source: Path, output: Path, redirect: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -m deepinfer_prep convert "{source}" "{output}" {redirect}'
    variables = {**os.environ, **environment}
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=variables)


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", "2>&- >/dev/null", "<&- 2>&-", ">&-"])
def test_a_stream_that_takes_nothing_stops_no_conversion(tmp_path: Path, redirect: str) -> None:
    source = write_checkpoint(tmp_path / "source")
    ended = run(source, tmp_path / "out", redirect)
    assert ended.returncode == 0, ended.stderr
    assert MANIFEST in os.listdir(tmp_path / "out")
    assert run(source, tmp_path / "expected", "").returncode == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_a_broken_pipe_behind_stderr_stops_no_conversion(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    run(source, tmp_path / "out", "2>&1 >/dev/null | true")
    assert MANIFEST in os.listdir(tmp_path / "out")


@pytest.mark.parametrize("options", ["", "--json"])
def test_a_full_stdout_is_told(tmp_path: Path, options: str) -> None:
    source = write_checkpoint(tmp_path / "source")
    ended = run(source, tmp_path / "out", f"--quiet {options} >/dev/full")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: the result could not be printed: No space left on device [ENOSPC]")
    assert "Traceback" not in ended.stderr
    assert MANIFEST in os.listdir(tmp_path / "out")


def test_names_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "\u00e9\u4e2d.txt").write_text("x")
    ended = run(
        source, tmp_path / "out", "--quiet", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING=""
    )
    assert ended.returncode == 0, ended.stderr
    assert "\u00e9\u4e2d.txt" in json.loads((tmp_path / "out" / MANIFEST).read_text(encoding="utf-8"))["files"]


@pytest.mark.parametrize("where", ["source/config.json", "source/new.json", "out/report.json", "source"])
def test_a_report_does_not_overwrite_source_or_output(tmp_path: Path, where: str) -> None:
    source = write_checkpoint(tmp_path / "source")
    before = tree(source)
    result = CliRunner().invoke(
        main, ["convert", str(source), str(tmp_path / "out"), "--quiet", "--report", str(tmp_path / where)]
    )
    assert result.exit_code in (1, 2)
    assert tree(source) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="links of another user are made by root")
def test_a_report_does_not_follow_somebody_elses_link(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "report.json").symlink_to(tmp_path / "precious")
    os.chown(tmp_path / "report.json", 12345, 12345, follow_symlinks=False)
    result = CliRunner().invoke(main, ["inspect", str(source), "--quiet"])
    assert result.exit_code == 0
    result = CliRunner().invoke(
        main, ["convert", str(source), str(tmp_path / "out"), "--quiet", "--report", str(tmp_path / "report.json")]
    )
    assert result.exit_code == 1
    assert "the report could not be written" in result.stderr
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="links of another user are made by root")
def test_a_page_does_not_follow_somebody_elses_link(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly (the extra `report`) is not installed")
    source, page = write_checkpoint(tmp_path / "source"), tmp_path / "report.html"
    (tmp_path / "precious").write_text("precious")
    page.symlink_to(tmp_path / "precious")
    os.chown(page, 12345, 12345, follow_symlinks=False)
    result = CliRunner().invoke(main, ["report", str(source), "-o", str(page), "--headers-only", "--quiet"])
    assert result.exit_code == 1
    assert str(page) in result.stderr
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_a_report_is_no_link_into_source_or_output(tmp_path: Path, command: str) -> None:
    source, output, report = write_checkpoint(tmp_path / "source"), tmp_path / "out", tmp_path / "report.json"
    if command == "verify":
        convert_checkpoint(source, output)
    shard = (output if command == "verify" else source) / "model-1.safetensors"
    before = shard.read_bytes()
    report.symlink_to(shard)
    places = [output, "--source", source] if command == "verify" else [source, output]
    result = CliRunner().invoke(main, [command, *map(str, places), "--quiet", "--report", str(report)])
    assert result.exit_code == 1
    assert "holds the checkpoint itself" in result.stderr
    assert shard.read_bytes() == before

"""The commands: exit status, text, JSON, quiet, and what goes to which stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from deepinfer_prep._version import __version__
from deepinfer_prep.cli.main import main
from tests.small_files import SCALE, WEIGHT, Tensor, tree, write_file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_file(tmp_path / "source" / "model.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    return tmp_path / "source"


@pytest.fixture
def unscaled(tmp_path: Path) -> Path:
    write_file(tmp_path / "unscaled" / "model.safetensors", {"l.weight": WEIGHT})
    return tmp_path / "unscaled"


def test_the_whole_way(sample: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    inspected = run("inspect", sample, "--scan")
    assert inspected.exit_code == 0
    assert "fp8 weight" in inspected.stdout
    assert "halved" in inspected.stdout
    assert "that halving rounds" in inspected.stdout
    converted = run("convert", sample, output)
    assert converted.exit_code == 0
    assert "brought into range" in converted.stdout
    assert "convert: " in converted.stderr
    verified = run("verify", output, "--source", sample)
    assert verified.exit_code == 0
    assert verified.stdout.endswith("verified: no difference\n")


def test_quiet_says_nothing_on_stderr(checkpoint: Path, tmp_path: Path) -> None:
    for arguments in (("convert", checkpoint, tmp_path / "out"), ("verify", tmp_path / "out")):
        assert run(*arguments, "--quiet").stderr == ""


def test_json_is_all_of_stdout_and_the_report_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    output, report = tmp_path / "out", tmp_path / "report.json"
    result = run("convert", checkpoint, output, "--json", "--report", report)
    data = json.loads(result.stdout)
    assert data == json.loads(report.read_text())
    assert data["counts"] == {"rounded": 0, "nan": 0, "misread": 4096}
    assert data["kernel_scales"] == {"stored": 1}
    inspected = json.loads(run("inspect", checkpoint, "--json").stdout)
    assert [kind["action"] for kind in inspected["kinds"]] == ["halved", "doubled"]
    assert inspected["refusals"] == []
    verified = json.loads(run("verify", output, "--json", "--source", checkpoint).stdout)
    assert verified["differences"] == 0
    assert verified["first"] == []


def test_a_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    result = run("convert", checkpoint, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "nothing was written" in result.stdout
    assert tree(tmp_path) == before
    assert not (tmp_path / "out").exists()


def test_a_dry_run_refuses_what_a_run_refuses(unscaled: Path, tmp_path: Path) -> None:
    for extra in ((), ("--dry-run",)):
        result = run("convert", unscaled, tmp_path / "out", *extra)
        assert result.exit_code == 1
        expected = "refused: F8_E4M3 tensors that have no scale (1): 'l.weight' in model.safetensors"
        assert result.stderr.startswith(expected)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("code", "scale", "options", "status", "told"),
    [
        (0x7E, 2.0, [], 0, "1 scales are unusually large, l.scale with 2 among them"),
        (0x7E, 64.0, [], 1, "tensor 'l.scale': element 0 is the scale 64"),
        (0x7F, 2.0**-9, ["--strict"], 1, "4,096 NaN codes in 1 fp8 weights: 'l.weight' (4,096)"),
    ],
)
def test_a_dry_run_reads_what_a_run_reads_before_it_writes(
    tmp_path: Path, code: int, scale: float, options: list[str], status: int, told: str
) -> None:
    data: dict[str, Tensor] = {
        "l.weight": ("F8_E4M3", (64, 64), code),
        "l.scale": ("F32", (1, 1), np.float32(scale).tobytes()),
    }
    write_file(tmp_path / "source" / "model.safetensors", data)
    before = tree(tmp_path)
    rehearsed = run("convert", tmp_path / "source", tmp_path / "out", "--dry-run", *options)
    assert rehearsed.exit_code == status
    assert told in rehearsed.output
    assert tree(tmp_path) == before
    assert told in run("convert", tmp_path / "source", tmp_path / "out", *options).output


def test_inspect_shows_refusals_and_fails(unscaled: Path) -> None:
    result = run("inspect", unscaled)
    assert result.exit_code == 1
    assert "refused: F8_E4M3 tensors that have no scale (1)" in result.stdout


def test_refusals_as_json(unscaled: Path, tmp_path: Path) -> None:
    result = run("convert", unscaled, tmp_path / "out", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["status"] == "refused"
    assert "'l.weight'" in data["messages"][0]
    assert data["codes"] == ["fp8-without-scale"] * len(data["messages"])


def test_a_difference_fails_verification(checkpoint: Path, tmp_path: Path) -> None:
    output, report = tmp_path / "out", tmp_path / "report.json"
    run("convert", checkpoint, output)
    data = bytearray((output / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (output / "model.safetensors").write_bytes(data)
    result = run("verify", output, "--source", checkpoint, "--report", report)
    assert result.exit_code == 1
    assert "DIFFERS: 2 differences" in result.stdout
    assert "tensor 'l.scale': element 3: expected byte" in result.stdout
    assert json.loads(report.read_text())["differences"] == 2


@pytest.mark.parametrize(
    "arguments", [(), ("convert",), ("convert", "a", "b", "--chunk-size", "12parsecs"), ("nosuch",)]
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_a_missing_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "nosuch")
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: {tmp_path / 'nosuch'} does not exist. Give the folder of a checkpoint, or one .safetensors file.\n"
    )


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"])
def test_help_has_examples(command: str) -> None:
    assert f"  deepinfer-prep {command} DeepSeek-V4.1-Flash" in run(command, "--help").output


def test_module_and_version() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "deepinfer_prep", "--version"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"deepinfer-prep, version {__version__}\n"


def test_no_command_imports_torch(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from deepinfer_prep.cli.main import main\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    main(line.split(), standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'numpy' in sys.modules\n"
    )
    output = tmp_path / "out"
    commands = f"inspect {checkpoint} --scan\nconvert {checkpoint} {output}\nverify {output} --source {checkpoint}\n"
    subprocess.run([sys.executable, "-c", code], input=commands, text=True, check=True, capture_output=True)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from deepinfer_prep.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "assert not {'numpy', 'torch', 'tqdm', 'safetensors'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

"""`verify --source` believes nothing that an output says of itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deepinfer_prep import Options, convert_checkpoint
from deepinfer_prep.cli.main import main
from tests.hostile.checkpoints import MANIFEST
from tests.small_files import ONE_F32, WEIGHT, Tensor, write_config, write_file


def verify(output: Path, source: Path | None, *options: str) -> Result:
    chosen = ["--source", str(source)] if source else []
    return CliRunner().invoke(main, ["verify", str(output), *chosen, "--quiet", *options])


def change(output: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((output / MANIFEST).read_text())
    edit(data)
    (output / MANIFEST).write_text(json.dumps(data))


def write(folder: Path, **tensors: Tensor) -> Path:
    write_file(folder / "model.safetensors", dict(tensors))
    write_config(folder, quant_method="fp8")
    return folder


def test_an_output_of_an_output_is_no_correct_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights were halved twice, which only the first output's marks tell."""
    first = write(tmp_path / "source", **{"a.weight": WEIGHT, "a.weight_scale": ("F32", (1,), ONE_F32)})
    convert_checkpoint(first, tmp_path / "once")
    (tmp_path / "once" / MANIFEST).unlink()
    monkeypatch.setattr("deepinfer_prep.planning.plan.find_refusals", lambda *arguments: ())
    convert_checkpoint(tmp_path / "once", tmp_path / "twice", overwrite=True)
    monkeypatch.undo()
    result = verify(tmp_path / "twice", tmp_path / "once")
    assert result.exit_code == 1
    assert "is itself an output of deepinfer-prep" in result.stderr


def test_fp8_that_was_copied_without_a_scale_is_told(tmp_path: Path) -> None:
    source = write(tmp_path / "source", **{"a.weight": ("F8_E4M3", (64, 64), 0x30)})
    convert_checkpoint(source, tmp_path / "out", options=Options(unscaled="copy-if-safe"))
    assert verify(tmp_path / "out", source).exit_code == 0
    change(tmp_path / "out", lambda data: data["options"].update(unscaled="refuse"))
    result = verify(tmp_path / "out", source)
    assert result.exit_code == 1
    assert "have no scale" in result.stdout


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"maps": ("a.weight=a.other",)}, {"unscaled": "copy-if-safe"}, {"strict": True}],
    ids=lambda options: next(iter(options)),
)
def test_options_that_the_output_names_are_printed(tmp_path: Path, options: dict[str, Any], as_json: bool) -> None:
    """A scale that is chosen by a map makes other numbers: whoever verifies has to see it."""
    tensors: dict[str, Tensor] = {"a.weight": ("F8_E4M3", (64, 64), 1), "a.other": ("F32", (1,), ONE_F32)}
    if "maps" not in options:
        tensors["a.weight_scale"] = ("F32", (1,), ONE_F32)
    source = write(tmp_path / "source", **tensors)
    convert_checkpoint(source, tmp_path / "out", options=Options(**options))
    result = verify(tmp_path / "out", source, *(["--json"] if as_json else []))
    assert result.exit_code == 0, result.stdout
    name, value = next(iter(options.items()))
    expected = list(value) if isinstance(value, tuple) else value
    if as_json:
        assert json.loads(result.stdout)["options"] == {name: expected}
    else:
        assert f"option         {name}: {json.dumps(expected)} (says the output)" in result.stdout


@pytest.mark.parametrize("count", ["rounded", "nan", "misread"])
def test_counts_are_those_of_the_source(tmp_path: Path, count: str) -> None:
    codes = bytes([0x7F, 0x7E, 0x03, 0x40]) * 1024
    source = write(
        tmp_path / "source",
        **{"a.weight": ("F8_E4M3", (64, 64), codes), "a.weight_scale": ("F32", (1,), ONE_F32)},
    )
    convert_checkpoint(source, tmp_path / "out")
    result = verify(tmp_path / "out", source)
    assert result.exit_code == 0, result.stdout
    assert "1,024, as in the source" in result.stdout
    change(tmp_path / "out", lambda data: data["counts"].update({count: 7}))
    result = verify(tmp_path / "out", source)
    assert result.exit_code == 1
    assert f"counts 7 codes as {count}, the source holds 1,024" in result.stdout


def test_without_a_source_nothing_is_said_of_it(tmp_path: Path) -> None:
    source = write(
        tmp_path / "source",
        **{"a.weight": ("F8_E4M3", (64, 64), 0x7F), "a.weight_scale": ("F32", (1,), ONE_F32)},
    )
    convert_checkpoint(source, tmp_path / "out")
    shutil.rmtree(source)
    result = verify(tmp_path / "out", None)
    assert result.exit_code == 0
    assert "as in the source" not in result.stdout
    assert "NaN codes      4,096" in result.stdout

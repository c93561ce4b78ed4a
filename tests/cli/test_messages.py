"""Messages that say what is the matter first, and promise nothing that is not so."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepinfer_prep import PrepError, RefusedError, convert_checkpoint, verify_checkpoint
from deepinfer_prep.cli.main import main
from tests.small_files import ONE_F32, SCALE, WEIGHT, Tensor, write_file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_file(tmp_path / "source" / "model.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    return tmp_path / "source"


def test_a_source_that_is_itself_an_output_is_named_before_anything_else(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "one")
    convert_checkpoint(source, tmp_path / "two")
    with pytest.raises(PrepError, match="two is itself an output of deepinfer-prep") as caught:
        verify_checkpoint(tmp_path / "one", source=tmp_path / "two")
    assert caught.value.code == "already-converted"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_what_may_not_be_written_promises_no_resumption(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def forbid(*arguments: Any, **more: Any) -> None:
        raise OSError(code, "forbidden", str(tmp_path / "above"))

    monkeypatch.setattr("deepinfer_prep.convert.convert_checkpoint", forbid)
    result = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "above" / "out"), "--quiet"])
    assert result.exit_code == 1
    assert errno.errorcode[code] in result.output
    assert "the same command" not in result.output
    assert "Change its permissions, or choose a place" in result.output


def test_a_lock_that_fails_for_another_reason_names_the_output(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(RefusedError, match=r"out: the lock .* could not be taken \(Input/output error \[EIO\]\)"):
        convert_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize(("name", "count"), [("l.input_scale", "1"), ("l.bias", "none")])
def test_reports_say_whether_static_scales_were_found(tmp_path: Path, name: str, count: str) -> None:
    tensors: dict[str, Tensor] = {
        "l.weight": WEIGHT,
        "l.weight_scale": ("F32", (), ONE_F32),
        name: ("F32", (), ONE_F32),
    }
    write_file(tmp_path / "source" / "model.safetensors", tensors)
    for command in (
        ["inspect", str(tmp_path / "source")],
        ["convert", str(tmp_path / "source"), str(tmp_path / "out")],
    ):
        result = CliRunner().invoke(main, [*command, "--quiet", "--activation-scales", "double"])
        assert f"static scales  {count} of e4m3 activations or of an fp8 KV cache" in result.output
